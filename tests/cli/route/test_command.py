"""`engine route`: the command line of smg that it becomes, and the one line when it does not."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.cli import main as cli
from engine.cli.exit_codes import ExitCode
from engine.cli.route import command, workers

from .conftest import MakeWorker


class Became(NamedTuple):
    """The end of a run: an exit code, or the arguments of smg."""

    code: int | None
    arguments: list[str]


Run = Callable[..., Became]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_smg(folder: Path, says: str = "smg 1.13.0") -> Path:
    """An executable that only knows its version."""
    path = folder / "smg"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def smg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """smg, beside the interpreter."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return make_smg(tmp_path)


@pytest.fixture
def run(smg: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `engine route`, on free ports."""
    monkeypatch.setattr(workers, "_POLL_S", 0.0)
    monkeypatch.delenv("ENGINE_API_KEY", raising=False)

    def route(*arguments: str) -> Became:
        became: list[list[str]] = []
        monkeypatch.setattr(os, "execv", lambda path, argv: became.append([path, *argv]))
        ports = ("--port", str(free_port()), "--metrics-port", str(free_port()))
        code = cli.run(["route", *ports, *arguments])
        if not became:
            return Became(code, [])
        assert became[0][:3] == [str(smg), str(smg), "launch"]
        return Became(None, became[0][3:])

    return route


def value_of(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_replicas(run: Run, make_worker: MakeWorker, capsys, tmp_path: Path):
    first, second = make_worker(), make_worker().serves(tokenizer=str(tmp_path))
    first.not_ready = 2

    arguments = run("--worker", first.url, "--worker", f"{second.url}/v1/", "--timeout", "60").arguments

    assert arguments[arguments.index("--worker-urls") + 1 :] == [first.url, second.url]
    assert value_of(arguments, "--host") == value_of(arguments, "--prometheus-host") == "127.0.0.1"
    assert value_of(arguments, "--policy") == "cache_aware"
    assert value_of(arguments, "--health-check-interval-secs") == "1"
    assert "--disable-tokenizer-autoload" in arguments, "the first worker has no tokenizer here"
    assert "--api-key" not in arguments
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        f"engine: waiting for {first.url}: /health answers 503 (the model is being loaded)"
    ), "said once, not for each look"
    assert lines[1:3] == [f"engine: {each.url} is ready and serves m" for each in (first, second)]
    assert re.fullmatch(r"engine: routing http://127.0.0.1:\d+ to 2 workers of m, cache_aware", lines[3])


def test_tokenizer_key_policy_and_options_of_smg(run: Run, make_worker: MakeWorker, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    worker = make_worker().serves(tokenizer=str(tmp_path))

    options = ("--policy", "round_robin", "--api-key", "sk", "--", "--log-level", "debug")
    arguments = run("--worker", worker.url, *options).arguments

    assert value_of(arguments, "--tokenizer-path") == str(tmp_path)
    assert value_of(arguments, "--policy") == "round_robin"
    assert value_of(arguments, "--api-key") == "sk"
    assert set(worker.keys) == {"Bearer sk"}
    assert arguments[-2:] == ["--log-level", "debug"], "the last of two options counts"


def test_prefill_and_decode(run: Run, make_worker: MakeWorker):
    first, second, decode = make_worker(), make_worker(), make_worker().serves(mode="decode")
    for prefill in (first, second):
        prefill.serves(mode="prefill")

    named = ("--prefill", first.url, "8998", f"--prefill={second.url}", "--decode", decode.url)
    arguments = run(*named).arguments

    begin = arguments.index("--pd-disaggregation")
    assert arguments[begin + 1 :] == [
        *("--prefill", first.url, "8998"),
        *("--prefill", second.url, "none"),
        *("--decode", decode.url),
    ]


def test_the_argument_after_a_prefill_url_is_its_port_only_if_it_is_one():
    given = [
        "--prefill",
        "a",
        "8998",
        "--prefill=b",
        "none",
        "--prefill",
        "c",
        "--decode",
        "8998",
        "--",
        "--prefill",
    ]
    assert command.joined(given) == [
        *("--prefill", "a 8998", "--prefill=b none", "--prefill", "c", "--decode", "8998"),
        *("--", "--prefill"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no worker"),
        (["--worker", "ftp://a"], "--worker is 'ftp://a', but it must look like http://127.0.0.1:30001"),
        (["--worker", "http://a/b"], "without a path"),
        (["--worker", "http://u:secret@a"], "a URL with a password"),
        (["--worker", "http://"], "must look like"),
        (["--worker", "http://a:x"], "must look like"),
        (["--worker", "a", "--worker", "http://a/v1"], "http://a is named twice"),
        (["--worker", "a", "--decode", "b"], "drop one kind"),
        (["--prefill", "a", "8998"], "add --decode URL"),
        (["--decode", "a"], "add --prefill URL"),
        (["--prefill", "a", "0", "--decode", "b"], r"must lie in \[1, 65535\]"),
        (["http://a"], "name a server by --worker URL"),
        (["--worker", "a", "--", "b"], "put options of smg after --"),
        (["--worker", "a", "--policy", "best"], "'cache_aware', 'least_load'"),
        (["--worker", "a", "--timeout", "-1"], "must be 0 seconds or more"),
        (["--worker", "a", "--port", "0"], r"--port is 0, but it must lie in \[1, 65535\]"),
        (["--worker", "a", "--port", "29123", "--metrics-port", "29123"], "use two ports"),
    ],
)
def test_what_cannot_be_is_one_line(run: Run, capsys, arguments, message):
    ended = run(*arguments)

    [line] = capsys.readouterr().err.splitlines()
    assert ended.code == ExitCode.USER
    assert re.search(message, line), line
    assert "secret" not in line


def test_a_taken_port_is_found_before_workers_are_asked(run: Run, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("--worker", "http://127.0.0.1:9", "--metrics-port", str(port))

    assert ended.code == ExitCode.USER
    assert f"use --metrics-port {port + 1}\n" in capsys.readouterr().err


def test_a_worker_that_is_not_there(run: Run, capsys):
    ended = run("--worker", f"http://127.0.0.1:{free_port()}", "--timeout", "0")

    assert ended.code == ExitCode.SERVER
    assert "is not ready after 0 s: no server answers at" in capsys.readouterr().err


def test_a_server_of_another_kind(run: Run, make_worker: MakeWorker, capsys):
    worker = make_worker()
    del worker.replies["/v1/models"]
    assert run("--worker", worker.url).code == ExitCode.SERVER
    assert "/v1/models answers 404; check --worker" in capsys.readouterr().err
    worker.replies["/v1/models"] = 200, {"data": []}
    assert run("--worker", worker.url).code == ExitCode.SERVER
    assert "lists no model" in capsys.readouterr().err


def test_a_worker_may_lack_what_only_our_servers_have(run: Run, make_worker: MakeWorker):
    worker = make_worker()
    del worker.replies["/model_info"], worker.replies["/server_info"]
    assert "--disable-tokenizer-autoload" in run("--worker", worker.url).arguments


def test_a_worker_with_a_key(run: Run, make_worker: MakeWorker, capsys):
    worker = make_worker()
    worker.replies["/v1/models"] = 401, {}
    assert run("--worker", worker.url).code == ExitCode.USER
    assert "wants an API key; pass the key of the workers by --api-key" in capsys.readouterr().err
    assert run("--worker", worker.url, "--api-key", "x").code == ExitCode.USER
    assert "does not know this API key" in capsys.readouterr().err


def test_workers_of_different_models(run: Run, make_worker: MakeWorker, capsys):
    first, second = make_worker(), make_worker().serves("other")
    ended = run("--worker", first.url, "--worker", second.url)

    assert ended.code == ExitCode.USER
    assert f"{first.url} serves m and {second.url} serves other, but" in capsys.readouterr().err


def test_workers_of_different_lengths_are_told_apart(run: Run, make_worker: MakeWorker, capsys):
    first, second = make_worker(), make_worker().serves(length=32)
    assert run("--worker", first.url, "--worker", second.url).code is None
    assert f"note: {first.url} takes 64 tokens and {second.url} 32; " in capsys.readouterr().err


def test_a_worker_in_the_wrong_role(run: Run, make_worker: MakeWorker, capsys):
    worker, decode = make_worker(), make_worker().serves(mode="decode")
    assert run("--prefill", worker.url, "8998", "--decode", decode.url).code == ExitCode.USER
    assert (
        "has disaggregation_mode null, but --prefill needs prefill; name it by --worker"
        in capsys.readouterr().err
    )
    assert run("--worker", decode.url).code == ExitCode.USER
    assert "but --worker needs null; name it by --decode" in capsys.readouterr().err


def test_without_smg(run: Run, smg: Path, capsys, monkeypatch):
    smg.unlink()
    monkeypatch.setenv("PATH", str(smg.parent))
    assert run("--worker", "a").code == ExitCode.USER
    assert "smg is not installed" in (line := capsys.readouterr().err)
    assert "pip install smg==1.13.0 (or, in the repository, pip install '.[route]')" in line


def test_another_command_of_this_name(run: Run, smg: Path, capsys):
    make_smg(smg.parent, "usage: smg [-h] {launch,server}")
    assert run("--worker", "a").code == ExitCode.USER
    assert f"{smg} is not smg" in capsys.readouterr().err


def test_the_extra_installs_the_version_that_the_command_names():
    import tomllib

    from engine.cli.route.smg import VERSION

    project = tomllib.loads((Path(command.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["route"] == [f"smg=={VERSION}"]
