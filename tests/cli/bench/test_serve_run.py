"""Which server and endpoint `engine bench serve` measures, by our names and those of vLLM and SGLang."""

import json
import math
import subprocess
import sys

import msgspec
import pytest

from engine import ConfigError
from engine.cli import main as cli
from engine.cli.bench.result_file import read_results, write_results
from engine.cli.bench.serve_run import BACKENDS, ENDPOINTS, ServerSettings
from engine.cli.exit_codes import ExitCode
from engine.runtime.errors import ServerError


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"url": "http://a:1/v1/"}, "http://a:1"),
        ({"port": 8000}, "http://127.0.0.1:8000"),
        ({"host": "a"}, "http://a:30000"),
        ({"host": "a", "port": 8000}, "http://a:8000"),
        ({"host": "http://a", "port": 8000}, "http://a:8000"),
        ({"host": "::1", "port": 8000}, "http://[::1]:8000"),
    ],
)
def test_the_address(settings, url):
    assert ServerSettings(**settings).base_url == url


@pytest.mark.parametrize("more", [{"host": "a"}, {"port": 1}])
def test_an_address_given_twice_is_refused(more):
    with pytest.raises(
        ConfigError, match="the server is given twice, by --url http://b:1 and --host or --port"
    ):
        _ = ServerSettings(url="http://b:1", **more).base_url


def test_the_endpoint():
    assert ServerSettings().api == "completions"
    for name, endpoint in ENDPOINTS.items():
        assert ServerSettings(endpoint=name).api == endpoint
    for name, endpoint in BACKENDS.items():
        assert ServerSettings(backend=name).api == endpoint
        assert ServerSettings(backend=name, endpoint=endpoint).api == endpoint
    with pytest.raises(
        ConfigError, match="--backend openai calls completions, and --endpoint is chat; drop one"
    ):
        _ = ServerSettings(backend="openai", endpoint="chat").api


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "tgi"], "--backend is 'tgi', but it must be one of openai, vllm, "),
        (["--endpoint", "/v2"], "--endpoint is '/v2', but it must be one of completions, chat, "),
        (["--url", "http://a:1", "--port", "2"], "the server is given twice"),
        (
            ["--endpoint", "chat", "--dataset", "embed"],
            "--endpoint chat does not go with --dataset-name embed",
        ),
        (["--endpoint", "embeddings"], "--endpoint embeddings does not go with --dataset-name random"),
        (["--dataset", "embed", "--structured", "x"], "--structured has no effect on --dataset-name embed"),
        (["--backend", "openai-chat"], "--endpoint chat needs text prompts"),
        (
            ["--dataset-name", "custom"],
            "--dataset-name custom needs --dataset-path FILE; nothing is downloaded",
        ),
        (["--custom-output-len", "0"], "--custom-output-len is 0, but it must be at least 1"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(capsys, arguments, message):
    assert cli.run(["bench", "serve", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"engine: {message}")


@pytest.fixture
def measured(monkeypatch, make_run):
    """Runs without a server: their settings, in order; faster at a lower rate."""
    seen = []

    async def measure(server, sampling, workload, output, requests, warmup, structured):
        seen.append((workload.request_rate, workload.seed, len(requests), len(warmup), output.append))
        run = make_run(slowness=1 + len(seen), num_requests=20)
        client = {"model": "tiny", "request_rate": str(workload.request_rate)}
        run = msgspec.structs.replace(run, client=client)
        if output.output_file is not None:
            write_results(output.output_file, run, output.append)
        return run

    monkeypatch.setattr("engine.cli.bench.serve_run._measure_server", measure)
    return seen


def test_a_sweep_is_a_run_for_each_rate_with_other_prompts(capsys, measured, tmp_path):
    results, page = tmp_path / "runs.json", tmp_path / "page.html"
    arguments = ["--dataset-name", "embed", "--num-prompts", "4", "--seed", "5", "--sweep", "1,2.5,inf"]
    assert cli.run(["bench", "serve", *arguments, "--output-file", str(results), "--html", str(page)]) == 0
    assert measured == [(1.0, 5, 4, 1, False), (2.5, 6, 4, 0, True), (math.inf, 7, 4, 0, True)]
    assert len(read_results(results).runs) == 3
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("1", "2.5", "inf")] == ["1", "2.5", "inf"]
    text = page.read_text()
    assert "Throughput over the offered rate" in text and "Time to first token" in text
    assert (
        text.count("2.5 req/s") >= 1
        and "<script" not in text
        and "http://" not in text.replace("http://127.0.0.1:30000", "")
    )


@pytest.mark.parametrize(("admin_key", "sent"), [("admin", "admin"), (None, "own")])
def test_the_cache_is_flushed_with_the_admin_key_if_there_is_one(monkeypatch, admin_key, sent):
    """The requests bear the other key, so that limits of a tenant hold for them."""
    keys = []

    async def note(url, api_key, *rest):
        keys.append(api_key)
        return "tiny"

    async def flush_and_end(*args, before_run, **options):
        await before_run()
        raise ServerError("enough")

    monkeypatch.delenv("ENGINE_ADMIN_API_KEY", raising=False)
    if admin_key is not None:
        monkeypatch.setenv("ENGINE_ADMIN_API_KEY", admin_key)
    monkeypatch.setattr("engine.cli.bench.serve_run.check_ready", note)
    monkeypatch.setattr("engine.cli.bench.serve_run.flush_cache", note)
    monkeypatch.setattr("engine.cli.bench.serve_run.measure", flush_and_end)
    arguments = ["--flush-cache", "--api-key", "own", "--url", "http://127.0.0.1:9", "--num-prompts", "1"]
    assert cli.run(["bench", "serve", *arguments]) == ExitCode.SERVER
    assert keys == ["own", sent]


@pytest.mark.parametrize("sweep", ["", "1,", "0,1", "fast", "-1", "nan"])
def test_a_sweep_of_other_things_is_refused(capsys, measured, sweep):
    assert cli.run(["bench", "serve", "--dataset-name", "embed", "--sweep", sweep]) == 2
    assert "--sweep" in capsys.readouterr().err and measured == []


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("latency", ": engine bench offline --max-concurrency 1 has it"),
        ("throughput", ": engine bench offline has it"),
        ("frob", ""),
    ],
)
def test_an_unknown_command_lists_those_that_there_are(capsys, command, answer):
    assert cli.run(["bench", command, "--model", "x"]) == 2
    error = (
        f"engine: there is no command 'bench {command}'{answer}; the commands are serve, offline, compare\n"
    )
    assert capsys.readouterr().err == error


def test_in_a_pipe_a_comparison_is_plain_columns(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["simulate", "--num-requests", "5", "--compare", "fcfs,lpm", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "engine", *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(path.read_text())
    assert "\x1b" not in done.stdout
    assert not set(done.stdout) & set("│┃─━┏┓└┘┡╇")
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("fcfs "))
    assert len(row.split()) >= 10
