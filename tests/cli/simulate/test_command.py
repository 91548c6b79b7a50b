"""`engine simulate`: tables, JSON, and what is said about bad input."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from engine.cli import main as cli
from engine.cli.simulate.tables import _percent
from engine.runtime.config.engine_config import SchedulePolicyName

SMALL = ["simulate", "smollm2-135m", "--num-requests", "20", "--rate", "20", "--max-model-len", "4096"]


def test_one_run_shows_every_figure(capsys):
    assert cli.run([*SMALL, "--device", "cpu-2", "--output-len", "20", "--goodput", "ttft:500"]) == 0
    out = capsys.readouterr().out
    for text in ("smollm2-135m on 1 x cpu-2, chat, fcfs", "requests answered", "goodput", "TPOT", "P99"):
        assert text in out
    assert "roofline of the data sheets of cpu-2" in out


def test_compare_has_one_row_per_policy_and_json_has_the_figures(capsys, tmp_path):
    path = tmp_path / "reports.json"
    prompts = ["--prompt-lens", "10,50,20,100,30,15,80,25", "--num-requests", "8", "--rate", "inf"]
    assert cli.run([*SMALL, *prompts, "--compare", "static,fcfs", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "given lengths" in out
    static, fcfs = json.loads(path.read_text())
    assert (static["name"], fcfs["name"]) == ("static", "fcfs")
    assert static["num_requests"] == fcfs["num_requests"] == 8
    # 8 x 100 prompt tokens and 99 x 8 decodes, of which 800 - 330 are padding
    assert static["padding_share"] == pytest.approx(470 / 1592)
    assert fcfs["padding_share"] == 0.0
    assert f"{static['padding_share']:.0%}" in out


@pytest.mark.slow
def test_settings_come_by_flag_and_by_set(tmp_path):
    reports = []
    for flags in (
        ["--page-size", "64", "--max-running-requests", "1"],
        ["--set", "page_size=64", "--set", "max_num_seqs=1"],
    ):
        path = tmp_path / "report.json"
        assert cli.run([*SMALL, *flags, "--json", str(path)]) == 0
        reports.append(json.loads(path.read_text()))
    assert reports[0] == reports[1]
    assert reports[0][0]["queue_ms"]["p50"] > 100


def test_prefill_and_decode_apart(capsys, tmp_path):
    path = tmp_path / "report.json"
    flags = ["--replicas", "3", "--prefill-replicas", "1", "--dispatch-policy", "prefix-affinity"]
    command = ["simulate", "smollm2-135m", "--num-requests", "20", "--max-model-len", "4096"]
    assert cli.run([*command, *flags, "--workload", "batch", "--json", str(path)]) == 0
    assert json.loads(path.read_text())[0]["num_requests"] == 20
    assert "on 3 x h200" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--num-agents", "--prompt-len"])
def test_agents_take_numbers_from_1_on(capsys, flag):
    command = ["simulate", "smollm2-135m", "--workload", "agents", "--num-requests", "4", flag]
    assert cli.run([*command, "0"]) != 0
    assert f"{flag} is 0, but it must be at least 1" in capsys.readouterr().err
    assert cli.run([*command, "2"]) == 0
    assert "agents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "b300"], "--device is 'b300', but it must be one of h200, h100, a100, cpu-2"),
        (["--tp", "0"], "--tp is 0, but it must be at least 1"),
        (["--rate", "0"], "--rate is 0, but it must be above 0"),
        (["--num-requests", "0"], "--num-requests is 0, but it must be at least 1"),
        (["--compare", "fcfs,fastest"], "--compare has 'fastest', but it must be policies of fcfs, lpm"),
        (["--compare", ","], "--compare is ',', but it must be policies of"),
        (
            ["--workload", "nowhere"],
            "--workload is 'nowhere', but it must be one of chat, rag, batch, agents, or a file",
        ),
        (["--prompt-lens", "10,x"], "--prompt-lens is '10,x', but it must be lengths, such as 10,50,20"),
        (["--prompt-lens", "0"], "--prompt-lens is '0', but it must be lengths of 1 or more"),
        (["--goodput", "speed:1"], "--goodput has 'speed:1', but it must be metric:milliseconds"),
        (["--set", "lpm"], "--set is 'lpm', but it must be NAME=VALUE"),
        (["--set", "port=80"], "--set port has no effect on a simulation"),
        (["--set", "page_sise=8"], "unknown setting 'page_sise'; did you mean 'page_size'?"),
        (["--page-size", "0"], "page_size is 0, but it must be at least 1 (set by --page-size)"),
        (
            ["--replicas", "2", "--prefill-replicas", "2"],
            "--prefill-replicas is 2, but it must lie in [1, 1]",
        ),
        (["--dispatch-policy", "luck"], "Invalid value for '--dispatch-policy': 'luck' is not one of"),
        (
            ["--pp", "2", "--replicas", "2", "--prefill-replicas", "1"],
            "--pp is 2 and --prefill-replicas 1, but engines with stages hand no KV over; leave one of them out",
        ),
        (["--json", "/nowhere/x"], "cannot write /nowhere/x: No such file or directory"),
        (["--time-scale", "0"], "--time-scale has no effect on the workload 'chat': only a trace has times"),
        (
            ["--output-lens", "5"],
            "--output-lens has no effect on the workload 'chat': it goes with --prompt-lens",
        ),
        (
            ["--workload", "batch"],
            "--rate has no effect on the workload 'batch': all its requests come at once",
        ),
        (
            ["--workload", "agents", "--rate", "3"],
            "--rate has no effect on the workload 'agents': an answer brings the next turn",
        ),
        (
            ["--num-agents", "3"],
            "--num-agents has no effect on the workload 'chat'",
        ),
        (
            ["--prompt-lens", "5", "--output-len", "3"],
            "--output-len has no effect on the workload 'given lengths'",
        ),
        (["--prompt-lens", "5", "--workload", "rag"], "--workload rag and --prompt-lens are two workloads"),
        (["--set", "foo=8"], "unknown setting 'foo'; `engine serve --help` lists them all"),
        (["--workload-seed", "-1"], "--workload-seed is -1, but it must be 0 or more"),
        (["--tp", "two"], "--tp is 'two', but it must be a whole number"),
        (["--rate=fast"], "--rate is 'fast', but it must be a number"),
        (["x"], "there is no use for the argument x"),
        (["--prefill-replicas", "1"], "--prefill-replicas is 1, but the only replica must decode, too"),
        (["--run", "2"], "--run chooses a run of a decision log; name the log with --fit"),
        (["--fit", "/nowhere.log"], "/nowhere.log cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert cli.run([*SMALL, *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"engine: {message}")
    assert captured.err.count("\n") == 1


TRACE_LINE = '{"timestamp": 0, "input_length": 10, "output_length": 5}\n'
CONVERSATION = '[{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}]'


@pytest.mark.parametrize(
    ("text", "flags", "flag"),
    [
        (TRACE_LINE, ["--rate", "5"], "--rate"),
        (TRACE_LINE, ["--output-len", "5"], "--output-len"),
        (TRACE_LINE, ["--workload-seed", "5"], "--workload-seed"),
        (CONVERSATION, ["--time-scale", "2"], "--time-scale"),
        (CONVERSATION, ["--prompt-len", "5"], "--prompt-len"),
    ],
)
def test_an_option_without_a_meaning_for_the_file_is_a_mistake(capsys, tmp_path, text, flags, flag):
    path = tmp_path / "workload"
    path.write_text(text)
    command = ["simulate", "smollm2-135m", "--workload", str(path), "--num-requests", "3"]
    assert cli.run([*command, *flags]) == 2
    assert f"{flag} has no effect on the workload '{path}'" in capsys.readouterr().err
    assert cli.run(command) == 0


def test_where_figures_cannot_be_written_nothing_is_simulated(capsys, monkeypatch, tmp_path):
    from engine.simulator import cluster as simulate

    def no_simulation(*args: object, **kwargs: object) -> None:
        raise AssertionError("simulated before the file was tried")

    monkeypatch.setattr(simulate, "simulate", no_simulation)
    assert cli.run([*SMALL, "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"engine: cannot write {tmp_path}: Is a directory\n"
    assert cli.run([*SMALL, "--json", str(tmp_path / "new"), "--rate", "0"]) == 2
    assert not (tmp_path / "new").exists()


def test_notes_are_one_line_where_no_terminal_would_cut_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.run([*SMALL]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step times:")]
    assert note.endswith("us per request")


def test_a_model_that_does_not_fit_or_is_not_there(capsys):
    assert cli.run(["simulate", "llama-3.1-70b", "--device", "h100"]) == 2
    assert "llama-3.1-70b does not fit on h100" in capsys.readouterr().err
    assert cli.run(["simulate", "llama-9"]) == 2
    assert "there is no model 'llama-9': it must be one of smollm2-135m" in capsys.readouterr().err
    assert cli.run(["simulate", "llama-3.1-70b", "--device", "h100", "--tp", "4", "--num-requests", "3"]) == 0
    assert "4 x h100" in capsys.readouterr().out


def test_a_trace_of_another_kind_is_refused_or_read_with_its_options(capsys, tmp_path):
    row = {"timestamp": 0.5, "input_length": 36, "output_length": 2, "hash_ids": [7, 8, 9]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"timestamp": 1.5}) + "\n")
    assert cli.run(["simulate", "--workload", str(path)]) in (1, 2)
    assert "blocks of 512 tokens make 1; --trace-block-size 16 fits" in capsys.readouterr().err

    options = ["--trace-block-size", "16", "--trace-time-unit", "s"]
    assert cli.run(["simulate", "--workload", str(path), *options]) == 0
    assert cli.run(["simulate", "--workload", "chat", *options]) in (1, 2)
    assert "--trace-block-size has no effect on the workload 'chat'" in capsys.readouterr().err


def test_requests_beyond_the_simulated_context_are_explained(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 40000, "output_length": 2}\n')

    assert cli.run(["simulate", "llama-3.1-8b", "--workload", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The simulation holds 32,768 tokens of context, and llama-3.1-8b knows 131,072" in text
    assert "--max-model-len 131072 simulates them" in text
    assert cli.run(["simulate", "llama-3.1-8b", "--workload", str(path), "--max-model-len", "131072"]) == 0
    assert "The simulation holds" not in capsys.readouterr().out


def test_compare_says_when_policies_had_nothing_to_decide(capsys):
    assert cli.run([*SMALL, "--device", "h200", "--compare", "fcfs,lpm"]) == 0
    out = capsys.readouterr().out
    assert (
        "fcfs, lpm: the queue was empty after nearly every pass, so these policies had nothing to decide"
        in out
    )
    assert "req/s: answered requests per second from the first arrival to the last token" in out

    busy = ["simulate", "smollm2-135m", "--prompt-lens", "100", "--num-requests", "60", "--rate", "inf"]
    assert cli.run([*busy, "--max-running-requests", "4", "--compare", "fcfs,srtf"]) == 0
    assert "nothing to decide" not in capsys.readouterr().out


def test_help_of_compare_lists_every_policy(capsys):
    assert cli.run(["simulate", "--help"]) == 0
    words = capsys.readouterr().out.replace("│", " ").split()
    assert set(get_args(SchedulePolicyName)) <= {word.strip(",.:") for word in words}


def test_a_page_of_pictures(tmp_path):
    page = tmp_path / "page.html"
    assert cli.run([*SMALL, "--compare", "static,fcfs", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 6
    assert "Time to first token" in text
    assert "static: P50 " in text
    assert "smollm2-135m on 1 x h200, chat" in text
    assert cli.run([*SMALL, "--html", str(tmp_path / "none" / "page.html")]) == 2


def test_a_small_share_of_memory_is_not_zero():
    assert [_percent(share) for share in (0.0, 0.0004, 0.004, 0.09, 0.12, 1.0)] == [
        "0%",
        "<0.1%",
        "0.4%",
        "9.0%",
        "12%",
        "100%",
    ]
