"""`engine chat` without a model and a URL: the newest server of this user that takes requests, else this process."""

from __future__ import annotations

import os
import sys

import pytest

from engine.cli import main as cli
from engine.cli.chat import command
from engine.cli.chat.backend import HttpBackend
from engine.cli.server_client import attach
from engine.launch.child.socket_dir import ServerRecord
from engine.runtime.config.environment import variable_of
from engine.runtime.errors import ConfigError

NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def running(monkeypatch):
    """Set the URLs of the servers that run, oldest first."""

    def run(*urls):
        records = [ServerRecord(i + 1, "m", "/m", url, float(i)) for i, url in enumerate(urls)]
        monkeypatch.setattr("engine.cli.server_client.running_servers", lambda: records)

    return run


@pytest.fixture
def in_process(monkeypatch):
    """Models that would be loaded into this process raise an error instead."""

    def start(*_args):
        raise ConfigError("a model is loaded here")

    monkeypatch.setattr(command, "_start", start)
    monkeypatch.setattr(sys, "stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115


def notes_of(api_key=None):
    notes: list[str] = []
    backend = attach(lambda url: HttpBackend(url, api_key=api_key, form={}), notes.append)
    if backend is not None:
        backend.close()
    return backend, notes


def test_without_a_server_there_is_nothing_to_attach_to(running):
    running()
    assert notes_of() == (None, [])
    running("")  # it starts
    assert notes_of() == (None, [])


def test_the_newest_server_is_taken_with_the_key(running, server):
    running(NO_SERVER, server.url, "")
    backend, notes = notes_of("secret")
    assert (backend.model, backend.where) == ("first", f"at {server.url}")
    assert server.keys == ["Bearer secret"]
    assert notes == [
        f"attached to first at {server.url}, the newest of 2 servers (--url chooses another one); "
        "--no-attach loads a model here"
    ]


def test_a_server_that_takes_no_requests_is_named_and_passed_over(running, server):
    running(server.url, NO_SERVER)
    backend, notes = notes_of()
    assert backend.where == f"at {server.url}"
    assert notes[0].startswith(f"the server at {NO_SERVER} is not used: no server answers")
    server.say("/v1/models", {"error": {"message": "the API key is missing"}}, status=401)
    running(server.url)
    backend, notes = notes_of()
    assert backend is None
    assert notes == [
        f"the server at {server.url} is not used: the server wants an API key; pass --api-key or set ENGINE_API_KEY"
    ]


def test_a_question_goes_to_the_server(capsys, running, server, in_process):
    running(server.url)
    server.stream({"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}]})
    for options, note in (((), f"engine: attached to first at {server.url}"), (("--quiet",), "")):
        assert cli.run(["chat", "Hi", "--seed", "3", *options]) == 0
        captured = capsys.readouterr()
        assert captured.out == "Hello\n"
        assert captured.err.startswith(note)
        assert captured.err.count("\n") == bool(note)
    assert [body["seed"] for body in server.bodies] == [3, 3]


@pytest.mark.parametrize("options", [[], ["--no-attach"]], ids=["attach", "no-attach"])
def test_a_configuration_from_a_pipe_is_read_once(monkeypatch, running, server, in_process, options):
    running(server.url)
    seen = []

    def start(merged, *_args):
        seen.append((merged.config.model.max_model_len, merged.config.scheduler.max_running_requests))
        raise ConfigError("a model is loaded here")

    monkeypatch.setattr(command, "_start", start)
    read_end, write_end = os.pipe()
    os.write(write_end, b"max_model_len: 512")
    os.close(write_end)
    try:
        assert cli.run(["chat", "Hi", "--config", f"/dev/fd/{read_end}", *options]) == 2
    finally:
        os.close(read_end)
    assert seen == [(512, 2)]


@pytest.mark.parametrize(
    ("options", "key"), [((), "of the variable"), (("--api-key", "of the option"), "of the option")]
)
def test_the_server_gets_the_key(monkeypatch, running, server, in_process, options, key):
    running(server.url)
    server.stream({"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}]})
    monkeypatch.setenv("ENGINE_API_KEY", "of the variable")
    assert cli.run(["chat", "Hi", *options]) == 0
    assert set(server.keys) == {f"Bearer {key}"}


@pytest.mark.parametrize(
    "options",
    [["--no-attach"], ["--model", "default"], ["--dtype", "float32"], ["--config", "FILE"], ["VARIABLE"]],
    ids=" ".join,
)
def test_what_says_how_to_load_a_model_keeps_it_in_this_process(
    capsys, monkeypatch, tmp_path, running, server, in_process, options
):
    running(server.url)
    config = tmp_path / "engine.yaml"
    config.write_text("max_model_len: 512\n")
    if options == ["VARIABLE"]:
        monkeypatch.setenv(variable_of("model"), "default")
        options = []
    assert cli.run(["chat", "Hi", *(str(config) if word == "FILE" else word for word in options)]) == 2
    assert capsys.readouterr().err == "engine: a model is loaded here\n"
    assert server.keys == []


def test_a_server_of_an_embedder_is_passed_over_with_the_reason(running, server):
    server.say("/v1/models", {"data": [{"id": "minilm", "task": "embed"}]})
    running(server.url)
    backend, notes = notes_of()
    assert backend is None
    assert notes == [
        f"the server at {server.url} is not used: minilm at {server.url} makes vectors of texts and cannot chat; use "
        "`engine embed` with it, or chat with another model"
    ]
