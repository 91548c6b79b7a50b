"""`engine bench` and `engine chat` as a user runs them, in processes of their own."""

from __future__ import annotations

import json

import pytest

from .serving import run_engine

pytestmark = pytest.mark.real_process

IN_PROCESS = ("--dtype", "float32", "--num-threads", "1")


def the_run(path):
    """The one run of a result file, whose sums must be right."""
    results = json.loads(path.read_text())
    assert results["schema"] == "engine-bench/1"
    (run,) = results["runs"]
    summary, requests = run["summary"], run["requests"]
    assert (summary["completed"], summary["failed"]) == (len(requests), 0)
    assert summary["prompt_tokens"] == sum(request["prompt_tokens"] for request in requests)
    assert summary["output_tokens"] == sum(request["output_tokens"] for request in requests)
    for request in requests:
        assert request["error"] is None
        assert 0 < request["ttft_s"] <= request["e2e_s"] <= summary["duration_s"] + 1e-6
    return run


def test_bench_serve_measures_a_server(serve, model, tmp_path):
    path = tmp_path / "serve.json"
    arguments = (
        *("--url", serve.url, "--tokenizer", str(model), "--num-prompts", "12", "--max-concurrency", "4"),
        *("--random-input-len", "8:40", "--random-output-len", "4:12", "--request-rate", "200"),
        *("--goodput", "ttft:60000 tpot:60000", "--output-file", str(path)),
    )
    done = run_engine(tmp_path, "bench", "serve", *arguments)
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout
    run = the_run(path)
    assert (run["kind"], run["client"]["num_prompts"], run["server"]["model"]) == ("serve", 12, serve.model)
    assert all(4 <= request["output_tokens"] <= 12 for request in run["requests"])
    assert all(8 <= request["prompt_tokens"] <= 40 for request in run["requests"])
    assert run["summary"]["goodput_rate"] == pytest.approx(12 / run["summary"]["duration_s"])
    serve.idle_metrics()


@pytest.mark.slow
def test_bench_serve_sees_the_prefix_cache(serve, model, tmp_path):
    path = tmp_path / "shared.json"
    arguments = (
        *("--url", serve.url, "--tokenizer", str(model), "--dataset-name", "generated-shared-prefix"),
        *("--gsp-num-groups", "2", "--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "64"),
        *("--gsp-question-len", "8", "--gsp-output-len", "4", "--max-concurrency", "1", "--flush-cache"),
        *("--output-file", str(path)),
    )
    done = run_engine(tmp_path, "bench", "serve", *arguments)
    assert done.returncode == 0, done.stderr
    # One prompt after the other: the first of each group computes the prefix, three find its four pages.
    assert sorted(request["cached_tokens"] for request in the_run(path)["requests"]) == [0] * 2 + [64] * 6


@pytest.mark.slow
def test_bench_serve_without_a_server_says_so(model, tmp_path):
    arguments = ("--url", "http://127.0.0.1:9", "--tokenizer", str(model), "--ready-check-timeout-sec", "0.2")
    done = run_engine(tmp_path, "bench", "serve", *arguments)
    assert done.returncode not in (0, None)
    assert "http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_bench_offline_measures_in_its_own_process_and_compare_judges(model, tmp_path):
    path = tmp_path / "offline.json"
    arguments = (
        *("bench", "offline", str(model), *IN_PROCESS, "--num-prompts", "8", "--random-input-len", "20"),
        *("--random-output-len", "6", "--output-file", str(path)),
    )
    done = run_engine(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    run = the_run(path)
    assert (run["kind"], run["summary"]["output_tokens"]) == ("offline", 48)
    assert run["server"]["config"]["model"]["dtype"] == "float32"

    compared = run_engine(tmp_path, "bench", "compare", str(path), str(path))
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout


@pytest.mark.slow
def test_chat_answers_one_question_with_nothing_else_on_stdout(model, serve, client, tmp_path):
    """In process, attached to the server, and through the API: the same answer."""
    question = "what is the quick brown fox?"
    fields = ("--temperature", "0", "--top-p", "1", "--max-tokens", "12")
    answer = client.chat.completions.create(
        model=serve.model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=12
    )
    expected = answer.choices[0].message.content

    own = run_engine(tmp_path, "chat", "--model", str(model), *IN_PROCESS, *fields, question)
    attached = run_engine(tmp_path, "chat", "--url", serve.url, *fields, question)
    piped = run_engine(tmp_path, "chat", "--url", serve.url, *fields, stdin=question)
    as_json = run_engine(tmp_path, "chat", "--url", serve.url, *fields, "--json", question)

    for done in (own, attached, piped, as_json):
        assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(as_json.stdout)["answer"] == expected
    as_read = expected.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads text
    assert own.stdout == attached.stdout == piped.stdout == as_read + "\n" * (not as_read.endswith("\n"))


@pytest.mark.slow
def test_chat_without_its_server_says_so(tmp_path):
    done = run_engine(tmp_path, "chat", "--url", "http://127.0.0.1:9", "hello")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "127.0.0.1:9" in done.stderr
