"""Failures of `engine serve` that need no model: told before the model's files are read, and with no process started.

The model of these command lines does not exist: a check that came later would tell of the model instead.
"""

from __future__ import annotations

import os
import socket

import pytest

from engine.cli import main as cli
from engine.runtime.config.config_fields import config_fields
from engine.runtime.config.config_sources import from_arguments, merge
from engine.scheduler.journal.log_writer import check_log_file

CASES = {
    "--api-key ''": "argument 6 (--api-key) is empty",
    "--api-key ' a'": "spaces at its ends",
    "--admin-api-key ''": "argument 6 (--admin-api-key) is empty",
    "--lora x=/nope": "--lora x=/nope: there is no such folder or file; check the path",
    "--api-key a --admin-api-key a": "is also one of the clients' keys",
    "--api-key-file /nope": "the API keys cannot be read: No such file",
    "--api-key-file EMPTY": "there is no API key in it",
    "--api-key-file PIPE": "which is a pipe, but each new process of the server reads it; name a regular file",
    "--ssl-certfile PIPE": "which is a pipe",
    "--ssl-certfile EMPTY --ssl-keyfile PIPE": "which is a pipe",
    "--api-key-file DIR": "the API keys cannot be read: Is a directory",
    "--ssl-certfile /nope": "ssl_certfile /nope with the key in /nope cannot be used: No such file",
    "--ssl-certfile EMPTY": "cannot be used",
    "--ssl-certfile EMPTY --ssl-keyfile /nope": "cannot be used",
    "--ssl-keyfile /nope": "ssl_keyfile is set, but there is no certificate",
    "--decision-log /nope/x": "decision_log is '/nope/x', which cannot be written: No such file",
    "--decision-log DIR": "which cannot be written: Is a directory",
    "--decision-log TEXT": "exists and is no decision log",
    "--crash-dir TEXT": "is no folder; name another folder",
    "--crash-dir TEXT/below": "is no folder; name another folder",
    "--crash-dir /proc/nope": "crash_dir is '/proc/nope', but /proc is not writable",
    "--state-dir TEXT": "is no folder; name another folder",
    "--state-dir TEXT/below": "is no folder; name another folder",
    "--allowed-local-media-path nope": "is 'nope', but it must be an absolute path",
    "--chat-template /nope": "the chat template cannot be read: No such file",
    "--chat-template DIR": "the chat template cannot be read: Is a directory",
    "--chat-template LATIN": "the chat template cannot be read: it is not UTF-8 text",
    "--decision-calibration /nope": "decision_calibration /nope cannot be read: No such file",
    "--decision-calibration PIPE": "is no regular file; name a JSON file",
    "--decision-calibration TEXT": "is no JSON",
    "--chat-template BROKEN": "has a syntax error in line 1",
    "--cluster-key-file /nope --nnodes 2 --tp 2 --dist-init-addr 127.0.0.1:1": "cluster_key_file /nope cannot be read",
    "--nnodes 2 --tp 2 --dist-init-addr 127.0.0.1:1": "need a secret that others do not have",
    "--nnodes 2 --tp 2 --node-rank 1 --dist-init-addr 127.0.0.1:1": "need a secret that others do not have",
    "--tool-call-parser nope": "--tool-call-parser is 'nope', but it must be auto, none, or one of",
    "--reasoning-parser nope": "--reasoning-parser is 'nope', but it must be auto, none, or one of",
    "--host no.such.host.invalid": "host 'no.such.host.invalid' has no address",
    "--host LONG": "has no address (it is no host name)",
    "--host 192.0.2.1": "cannot listen on 192.0.2.1",
    "--port TAKEN": "is in use, maybe by another engine",
}
PATH_WORDS = ("file", "dir", "path", "decision_log", "chat_template")


@pytest.fixture
def words(tmp_path):
    (tmp_path / "dir").mkdir()
    texts = {"EMPTY": b"", "TEXT": b"some text", "LATIN": b"caf\xe9", "BROKEN": b"{% if %}"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    os.mkfifo(tmp_path / "PIPE")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {
            "DIR": str(tmp_path / "dir"),
            "LONG": "a" * 70,
            "TAKEN": str(taken.getsockname()[1]),
            "''": "",
            "' a'": " a",
            **{name: str(tmp_path / name) for name in (*texts, "PIPE")},
        }


def split(command, words):
    """The arguments of a command line with the words that stand for paths replaced."""
    given = command.replace("' a'", "SPACE").split()
    words = {**words, "SPACE": " a", "TEXT/below": f"{words['TEXT']}/below"}
    return [words.get(word, word) for word in given]


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("command", CASES)
def test_it_is_told_before_the_model_is_looked_for(capsys, monkeypatch, words, command):
    if command.startswith("--crash-dir /proc") and os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere

    def no_process(*_args, **_kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", no_process)
    port = () if "--port" in command else ("--port", "0")
    assert cli.run(["serve", "/no/such/model", *port, *split(command, words)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert CASES[command] in line
    assert "/no/such/model" not in line


def test_every_setting_that_names_a_file_is_in_the_table():
    named = {
        name
        for name, field in config_fields().items()
        if field.kind is str and not field.choices and any(word in name for word in PATH_WORDS)
    }
    assert named == {
        name
        for name in config_fields()
        if any(config_fields()[name].flag + " " in case for case in CASES)
        and any(word in name for word in PATH_WORDS)
    }


def test_a_check_leaves_nothing_behind(tmp_path):
    check_log_file(tmp_path / "run.log")
    assert list(tmp_path.iterdir()) == []
    from engine.cli.preflight import check_start

    settings = {"port": 0, "crash_dir": str(tmp_path / "a" / "b"), "decision_log": str(tmp_path / "run.log")}
    check_start(merge(from_arguments(settings)).config)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_not_read(tmp_path):
    from engine.cli.preflight import check_start

    os.mkfifo(tmp_path / "template")
    check_start(merge(from_arguments({"port": 0, "chat_template": str(tmp_path / "template")})).config)


def test_an_llm_refuses_a_log_that_cannot_be_written_before_it_loads(tiny_model):
    from engine import LLM, ConfigError

    steps: list[str] = []
    with pytest.raises(ConfigError, match="decision_log is '/nope/x', which cannot be written"):
        LLM(str(tiny_model), decision_log="/nope/x", on_step=steps.append)
    assert "load weights" not in steps
