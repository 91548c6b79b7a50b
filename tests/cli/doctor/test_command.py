"""`engine doctor` as a command: lines, JSON, exit codes, and what `engine serve` says at its start."""

from __future__ import annotations

import json
import socket

import pytest

from engine.cli import main as cli
from engine.cli.doctor import compute as torch_probe
from engine.cli.doctor import machine_facts
from engine.cli.doctor.check import Check, CheckStatus, fail, ok, refused, warn
from engine.cli.doctor.command import json_text, summary, warn_at_start
from engine.model_runner.kernels.cpu.compiler import ISAS
from engine.runtime.config.engine_config import EngineConfig

from .conftest import host, machine, torch


def test_lines_and_exit_code_of_what_will_serve(capsys, good_machine, tiny_model):
    assert cli.run(["doctor", str(tiny_model)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert lines[0] == "ok   python     Python 3.12.1"
    assert lines[-1] == "It will serve."
    assert {line.split()[0] for line in lines[:-1]} == {"ok", "skip"}


def test_json_and_exit_code_of_what_will_not(capsys, good_machine, tiny_model):
    assert cli.run(["doctor", str(tiny_model), "--max-model-len", "9999", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["will_serve"] is False
    (check,) = [check for check in found["checks"] if check["verdict"] not in ("ok", "skip")]
    assert check == {
        "code": "fit",
        "verdict": "fail",
        "text": "max_model_len is 9999, but the model knows positions up to 1024 only",
        "fix": "lower --max-model-len",
        "details": {},
    }


@pytest.mark.parametrize(
    ("holder", "arguments", "verdict"),
    [
        ("pid 7, engine: tokenizer_manager", (), "warn"),
        ("pid 7, engine: tokenizer_manager", ("--port", "30000"), "fail"),
        ("pid 7, nginx", (), "fail"),
        ("", (), "fail"),
    ],
)
def test_an_engine_that_runs_is_no_reason_against_a_model(
    capsys, good_machine, monkeypatch, tiny_model, holder, arguments, verdict
):
    taken = machine(port_error="127.0.0.1:30000 is in use; use --port 30001", port_holder=holder)
    monkeypatch.setattr(machine_facts, "gather_machine", lambda *_args, **_kwargs: taken)
    assert cli.run(["doctor", str(tiny_model), *arguments]) == (verdict == "fail")
    *lines, last = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.split()[1] == "port")
    assert line.startswith(f"{verdict} port") and line.endswith("-> use --port 30001")
    assert last == ("It will not serve: port." if verdict == "fail" else "It will serve, but see port.")


def test_lines_are_written_as_they_are_found(capsys, monkeypatch, good_machine, tiny_model):
    """A long step, such as the import of torch, begins after the lines before it can be read."""
    before = []

    def gather():
        before.append(capsys.readouterr().out)
        return torch()

    monkeypatch.setattr(torch_probe, "gather_torch", gather)
    assert cli.run(["doctor", str(tiny_model)]) == 0
    assert "port       127.0.0.1:30000 is free" in before[0]


def test_no_model_is_the_default_one_and_nothing_is_fetched(capsys, good_machine, monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    assert cli.run(["doctor"]) == 0
    assert "the first start fetches the default model" in capsys.readouterr().out


def test_what_is_no_model_is_one_line_with_a_way_out(capsys, good_machine):
    assert cli.run(["doctor", "/no/such/model"]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("fail")]
    assert line.startswith(
        "fail model      /no/such/model: there is no such folder or .gguf file -> give one"
    )
    assert out.endswith("It will not serve: model.\n")


def test_a_wrong_option_is_one_line(capsys):
    assert cli.run(["doctor", "--page-size", "none"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_port_is_that_of_the_command(capsys, monkeypatch, tiny_model):
    monkeypatch.setattr(torch_probe, "gather_torch", torch)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert cli.run(["doctor", str(tiny_model), "--port", str(port), "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["code"] for check in checks if check["verdict"] == "fail"] == ["port"]


def test_the_summary_names_what_matters():
    good, bad, odd = ok("a", "fine"), fail("b", "broken", "mend it"), warn("c", "odd", "see to it")
    assert summary([good]) == "It will serve."
    assert summary([good, odd]) == "It will serve, but see c."
    assert summary([good, odd, bad]) == "It will not serve: b."
    assert json.loads(json_text([good, odd]))["will_serve"] is True


def test_the_way_out_of_an_error_is_the_fix():
    assert refused("x", "a is 3; so it is; lower a") == Check(
        "x", CheckStatus.FAIL, "a is 3; so it is", "lower a"
    )
    assert refused("x", "no way out") == Check("x", CheckStatus.FAIL, "no way out", "see the message")


def test_a_start_says_only_what_is_not_well(caplog, monkeypatch):
    little = host(mem_available_bytes=1 << 29)
    bad = machine(host=little, unmet=(), port_error="in use; use another")
    monkeypatch.setattr(machine_facts, "gather_machine", lambda *args, **kwargs: bad)
    assert warn_at_start(EngineConfig()) == little
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "check=memory 512 MiB can be allocated -> end other programs, or raise"
    )

    caplog.clear()
    monkeypatch.setattr(machine_facts, "gather_machine", lambda *args, **kwargs: machine())
    warn_at_start(EngineConfig())
    assert caplog.records == []


@pytest.mark.slow
def test_the_real_probe_finds_torch():
    facts = torch_probe.gather_torch()
    assert facts.error == ""
    assert facts.version and facts.isa
    assert facts.cpu_kernels_error or facts.loaded_isa in ISAS
