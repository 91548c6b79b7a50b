"""The exit codes: one table for all commands, each driven into each class of failure that it can have."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from engine.cli import main as cli
from engine.cli.exit_codes import MEANINGS, ExitCode
from engine.runtime.errors import ConfigError, EngineDeadError, RequestError, ServerError

NO_SERVER = "http://127.0.0.1:9"
LINES = f"{shlex.quote(__file__)} --skip-empty"
COMMANDS = (
    "serve",
    "fleet",
    "chat",
    "embed",
    "rerank",
    "decisions",
    "decisions fit",
    "pull",
    "list",
    "rm",
    "ps",
    "launch",
    "batch",
    "state",
    "state list",
    "state purge",
    "state check",
    "bench",
    "bench serve",
    "bench offline",
    "bench compare",
    "doctor",
    "top",
    "why",
    "replay",
    "trace",
    "simulate",
)
CASES = [
    # help, and nothing asked for
    *((command, "--help", ExitCode.SUCCESS) for command in COMMANDS),
    ("", "", ExitCode.SUCCESS),
    ("", "--version", ExitCode.SUCCESS),
    ("bench", "", ExitCode.SUCCESS),
    ("decisions", "", ExitCode.SUCCESS),
    ("state", "", ExitCode.SUCCESS),
    # wrong usage
    *((command, "--no-such-option", ExitCode.USER) for command in COMMANDS),
    *(
        (command, "", ExitCode.USER)
        for command in (
            "rerank",
            "decisions fit",
            "pull",
            "rm",
            "launch",
            "batch",
            "state list",
            "state purge",
            "state check",
            "bench compare",
            "why",
            "replay",
            "trace",
        )
    ),
    ("no-such-command", "", ExitCode.USER),
    ("bench", "no-such-command", ExitCode.USER),
    ("serve", "--port x", ExitCode.USER),
    ("serve", "--port 70000", ExitCode.USER),
    ("chat", "hi --temperature hot", ExitCode.USER),
    ("embed", f"{LINES} --format x", ExitCode.USER),
    ("rerank", f"x {LINES} --top-n 0", ExitCode.USER),
    ("bench serve", "--num-prompts 0", ExitCode.USER),
    ("bench offline", "--num-prompts 0", ExitCode.USER),
    ("top", "--interval 0", ExitCode.USER),
    ("simulate", "--replicas 0", ExitCode.USER),
    ("replay", "/nope --set x", ExitCode.USER),
    # a missing file
    *(
        (command, "--config /nope.yaml", ExitCode.USER)
        for command in ("serve", "bench offline", "doctor", "simulate")
    ),
    ("chat", "hi --config /nope.yaml", ExitCode.USER),
    *(("chat", f"hi {option} /nope.json", ExitCode.USER) for option in ("--load", "--schema", "--tools")),
    ("embed", "/nope", ExitCode.USER),
    ("embed", f"{LINES} --output /nope/x.npy", ExitCode.USER),
    ("rerank", "x /nope", ExitCode.USER),
    ("decisions fit", "/nope", ExitCode.USER),
    ("bench serve", "--structured /nope.json", ExitCode.USER),
    ("bench serve", "--output-file /nope/x.json", ExitCode.USER),
    ("bench serve", "--output-file /", ExitCode.USER),
    ("bench compare", "/nope /nope", ExitCode.USER),
    ("why", "x --log /nope", ExitCode.USER),
    ("top", "--once --cacert /nope", ExitCode.USER),
    ("replay", "/nope", ExitCode.USER),
    ("replay", "/nope --set schedule_policy=lpm", ExitCode.USER),
    ("trace", "/nope", ExitCode.USER),
    ("simulate", "--workload /nope", ExitCode.USER),
    ("simulate", "--fit /nope", ExitCode.USER),
    ("simulate", "--json /nope/x.json", ExitCode.USER),
    ("launch", "vim", ExitCode.USER),
    # an unknown model; for doctor it is the result of a check
    ("serve", "/nope --port 0", ExitCode.USER),
    ("serve", "/nope --print-config", ExitCode.USER),
    ("chat", "hi --model /nope", ExitCode.USER),
    ("embed", f"{LINES} --model /nope", ExitCode.USER),
    ("rerank", f"x {LINES} --model /nope", ExitCode.USER),
    *((command, "/nope", ExitCode.USER) for command in ("pull", "rm")),
    ("bench offline", "/nope", ExitCode.USER),
    ("bench serve", "--tokenizer /nope", ExitCode.USER),
    ("simulate", "/nope", ExitCode.USER),
    ("doctor", "/nope --json", ExitCode.FAILED),
    # no server
    ("chat", f"hi --url {NO_SERVER}", ExitCode.SERVER),
    ("embed", f"{LINES} --url {NO_SERVER}", ExitCode.SERVER),
    ("rerank", f"x {LINES} --url {NO_SERVER}", ExitCode.SERVER),
    ("bench serve", f"--url {NO_SERVER} --ready-check-timeout-sec 0 --tokenizer TINY", ExitCode.SERVER),
    ("top", f"--once {NO_SERVER}", ExitCode.SERVER),
    ("fleet", "--replicas 0", ExitCode.USER),
    ("fleet", "-- --no-such-option", ExitCode.USER),
    ("why", f"x --url {NO_SERVER}", ExitCode.SERVER),
]


def test_every_command_is_in_the_table():
    assert {command.split()[0] for command in COMMANDS} == set(cli.COMMANDS)


@pytest.fixture(autouse=True)
def no_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.mark.fast_cases(40)
@pytest.mark.parametrize(("command", "arguments", "code"), CASES, ids=str)
def test_each_command_and_failure_has_the_code_of_the_table(capsys, tiny_model, command, arguments, code):
    words = [*command.split(), *shlex.split(arguments)]
    assert cli.run([str(tiny_model) if word == "TINY" else word for word in words]) == code
    captured = capsys.readouterr()
    if code is ExitCode.SUCCESS:
        assert captured.out
        assert captured.err == ""
    elif command != "doctor":
        (line,) = captured.err.splitlines()
        assert line.startswith("engine: ")
        assert not line.startswith("engine: Usage")
        assert captured.out == ""


@contextmanager
def stand_in_server(status):
    """A server that answers everything with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"error": {"message": "the reason"}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  (a name of the base class)

        def log_message(self, *_args):
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


CLIENTS = (
    "chat hi --url URL",
    "bench serve --ready-check-timeout-sec 0 --tokenizer TINY --url URL",
    "top --once URL",
    "why x --url URL",
)


@pytest.mark.parametrize("command", CLIENTS)
@pytest.mark.parametrize(
    ("status", "code"),
    [(401, ExitCode.USER), (403, ExitCode.USER), (429, ExitCode.SERVER), (500, ExitCode.SERVER)],
)
def test_a_server_that_refuses_is_2_and_one_that_fails_is_3(capsys, tiny_model, command, status, code):
    with stand_in_server(status) as url:
        words = {"URL": url, "TINY": str(tiny_model)}
        assert cli.run([words.get(word, word) for word in command.split()]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("engine: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("the reason"), ExitCode.USER),
        (RequestError("the reason"), ExitCode.USER),
        (RequestError("the reason", status=429), ExitCode.SERVER),
        (PermissionError(errno.EACCES, "the reason", "/hers"), ExitCode.USER),
        (EngineDeadError("the reason"), ExitCode.FAILED),
        (ServerError("the reason"), ExitCode.SERVER),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_each_kind_of_error_has_one_code(capsys, monkeypatch, error, code):
    def failing(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(cli, "app", failing)
    assert cli.run([]) == code
    assert capsys.readouterr().err.count("the reason") == (code is not ExitCode.INTERRUPTED)


def test_a_port_in_use_is_something_to_correct(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.run(["serve", "--port", str(taken.getsockname()[1])]) == ExitCode.USER
    assert "is in use" in capsys.readouterr().err


@pytest.mark.fast_cases(1)
@pytest.mark.real_process
@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help"), ("doctor", "/nope")], ids=" ".join)
def test_a_reader_that_closes_the_output_ends_a_command_in_silence(arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "engine", *arguments],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (ExitCode.OUTPUT_CLOSED, b"")


@pytest.mark.fast_cases(2)
@pytest.mark.real_process
@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "list",
        "ps --json",
        "serve TINY --print-config",
        "chat --help",
        "doctor /nope",
        "bench",
    ],
)
def test_a_disk_without_space_is_one_line(arguments, monkeypatch, tmp_path, tiny_model):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "engine", *arguments.replace("TINY", str(tiny_model)).split()],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
            text=True,
        )
    assert done.stderr == "engine: the output cannot be written: No space left on device\n"
    assert done.returncode == ExitCode.USER


@pytest.mark.real_process
def test_an_output_that_is_closed_is_no_error():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m engine --version >&-"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (ExitCode.SUCCESS, b"")


@pytest.mark.real_process
def test_the_answer_of_a_server_on_a_disk_without_space(tmp_path):
    """The line after an answer that was received, and an error that has no room either."""
    with stand_in_server(200) as url:
        for redirection, error in (("> /dev/full", "cannot be written"), ("> /dev/full 2> /dev/full", "")):
            done = subprocess.run(
                ["sh", "-c", f"{sys.executable} -m engine top --once --json {url} {redirection}"],
                stderr=subprocess.PIPE,
                check=False,
                timeout=60,
                text=True,
            )
            assert done.returncode in (ExitCode.USER, ExitCode.SERVER)
            assert done.stderr.count("\n") == bool(error)


IMPORTING = """
import importlib.abc, os, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "NAME":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from engine.__main__ import main
sys.argv = ["engine", "chat", "--no-attach", "hi", "--model", "/nope"]
main()
"""
LOADING = """
import hashlib, os, signal, threading
from engine.cli.exit_codes import ends_at_interrupt

with ends_at_interrupt():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes of native code
"""


@pytest.mark.real_process
@pytest.mark.parametrize(
    "program",
    [
        IMPORTING.replace("NAME", "engine.cli.main"),
        IMPORTING.replace("NAME", "typer.main"),
        IMPORTING.replace("NAME", "engine.cli.chat.command"),
        LOADING,
    ],
    ids=["first import", "import of a library", "import of a command", "load of a model"],
)
def test_ctrl_c_ends_a_start_at_once_and_in_silence(program):
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, b"", b"")


def test_every_code_is_explained_and_none_twice():
    assert set(MEANINGS) == set(ExitCode)
    assert len(set(MEANINGS.values())) == len(MEANINGS)


def test_the_numbers_stay_because_scripts_compare_them():
    assert {code.name: code.value for code in ExitCode} == {
        "SUCCESS": 0,
        "FAILED": 1,
        "USER": 2,
        "SERVER": 3,
        "NOT_FOUND": 4,
        "INTERRUPTED": 130,
        "OUTPUT_CLOSED": 141,
    }
