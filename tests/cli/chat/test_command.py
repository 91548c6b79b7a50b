"""`engine chat` as a program: one question in, one answer out; and a conversation on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cli import main as cli
from engine.cli.chat import command
from engine.cli.chat.command import is_name_of_model, read_question
from engine.runtime.errors import ConfigError, EngineDeadError, RequestError, ServerError

CHAT = [sys.executable, "-m", "engine.cli.main", "chat"]
TINY = ["--num-threads", "1", "--dtype", "float32", "--temperature", "0"]


def slow(folder: Path) -> list[str]:
    """With these an answer of 100 tokens takes 5 s at least: it can be stopped before its end on any machine."""
    (folder / "slow.yaml").write_text("chaos: slow=0.05\n")
    return ["--config", str(folder / "slow.yaml")]


def chat(*arguments, stdin="", **options):
    return subprocess.run(
        [*CHAT, *arguments], input=stdin, capture_output=True, text=True, timeout=100, check=False, **options
    )


# ---------------------------------------------------------------- one question


@pytest.fixture
def chat_here(capfd, monkeypatch, tmp_path):
    """Chats in this process, which has what a new one would first import: exit code, output, errors."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()

    def chat(*arguments, stdin):
        (tmp_path / "stdin").write_text(stdin)
        with open(tmp_path / "stdin", encoding="utf-8") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", file)
            return cli.run(["chat", *arguments]), *capfd.readouterr()

    yield chat
    torch.set_num_threads(threads)


def test_one_question_gives_a_clean_answer(tiny_model, chat_here):
    done = chat("Hello", "--model", str(tiny_model), "--max-tokens", "6", *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 1
    assert "\x1b" not in done.stdout
    code, again, _ = chat_here(
        "--json", "--model", str(tiny_model), "--max-tokens", "6", *TINY, stdin="Hello\n"
    )
    assert code == 0
    document = json.loads(again)
    assert document["answer"] == done.stdout.removesuffix("\n")
    assert document["model"] == "tiny-llama"
    assert document["completion_tokens"] <= 6


@pytest.mark.slow
def test_figures_go_to_stderr_when_asked_for(tiny_model):
    done = chat("Hello", "--stats", "--model", str(tiny_model), "--max-tokens", "4", *TINY)
    assert re.fullmatch(r"TTFT \d+ ms( · [\d.]+ tok/s)? · \d+ in · \d+ out · ctx \d+/1024\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["Hi", "--temperature", "hot"], 2, "engine: temperature is 'hot', but it must be a number"),
        (["Hi", "--top-p", "7"], 2, "engine: top_p is 7.0, but it must lie in [0, 1]"),
        (["Hi", "--model", "/no/such"], 2, "engine: /no/such: there is no such folder or .gguf file"),
        (["Hi", "--url", "127.0.0.1:9"], 3, "engine: no server answers at http://127.0.0.1:9"),
        (["Hi", "--url", "127.0.0.1:9", "--dtype", "auto"], 2, "engine: --dtype has no effect on a server"),
        (
            ["Hi", "--load", "/no/such.json"],
            2,
            "engine: the saved chat /no/such.json cannot be read: No such file",
        ),
        ([], 2, "engine: there is no question and no terminal"),
        (["Hi", "--frobnicate"], 2, "engine: No such option: --frobnicate"),
    ],
)
def test_mistakes_are_one_line_with_an_exit_code(capfd, monkeypatch, arguments, code, message):
    monkeypatch.setattr(sys, "stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115
    assert cli.run(["chat", *arguments]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"), [(EngineDeadError("gone"), 1), (ServerError("gone"), 3), (RequestError("gone"), 2)]
)
def test_a_failing_engine_is_1_a_server_3_and_a_refused_question_2(capsys, monkeypatch, error, code):
    class Failing:
        model, where, max_context = "m", "w", None

        def answer(self, messages, settings):
            raise error

        def close(self):
            return

    monkeypatch.setattr(command, "_start", lambda *_args: Failing())
    monkeypatch.setattr(sys, "stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115
    assert cli.run(["chat", "Hi"]) == code
    assert capsys.readouterr().err == "engine: gone\n"


def test_a_question_and_piped_text_are_put_together(tmp_path):
    path = tmp_path / "input"
    path.write_text("the text\n")
    with open(path, encoding="utf-8") as stdin:
        assert read_question(["sum", "up:"], stdin) == "sum up:\n\nthe text"
    with open(path, encoding="utf-8") as stdin:
        assert read_question([], stdin) == "the text"
    with open(os.devnull, encoding="utf-8") as stdin:
        assert read_question(["hi"], stdin) == "hi"
        assert read_question([], stdin) is None
    path.write_bytes(b"\xff\xfe")
    with open(path, encoding="utf-8") as stdin, pytest.raises(ConfigError, match="not UTF-8 text"):
        read_question([], stdin)
    path.write_text(" \n")
    with open(path, encoding="utf-8") as stdin, pytest.raises(RequestError, match="standard input is empty"):
        read_question([], stdin)


@pytest.mark.parametrize(
    ("words", "is_model"),
    [
        (["smollm2"], True),
        (["SmolLM2-135M"], True),
        (["qwen3-0.6b"], True),
        (["org/repo:Q4_K_M"], True),
        (["./no-such.gguf"], True),
        (["{folder}"], True),
        (["smollm2", "hi"], False),
        (["Hello"], False),
        (["What is smollm2?"], False),
        (["org/repo:.."], False),
        ([], False),
    ],
)
def test_a_question_that_names_a_model_is_noticed(tiny_model, words, is_model):
    assert is_name_of_model([word.format(folder=tiny_model) for word in words]) is is_model


def test_a_model_as_the_question_has_a_note_that_names_the_option(capsys, monkeypatch):
    monkeypatch.setattr(command, "_start", lambda *_args: (_ for _ in ()).throw(RequestError("gone")))
    monkeypatch.setattr(sys, "stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115
    note = "'smollm2' is the question; to chat with that model: engine chat --model smollm2\n"
    for arguments, shown in (
        (["smollm2"], note),
        (["smollm2", "-q"], ""),
        (["smollm2", "--model", "smollm2"], ""),
        (["Hello"], ""),
    ):
        assert cli.run(["chat", *arguments]) == 2
        assert capsys.readouterr().err == f"{shown}engine: gone\n"


@pytest.mark.slow
def test_ctrl_c_ends_one_question_with_130(tiny_model, tmp_path):
    process = subprocess.Popen(
        [*CHAT, "Hello", "--model", str(tiny_model), *TINY, *slow(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert err == b""
    assert process.returncode == 130


# ---------------------------------------------------------------- a conversation


PROMPT = r">>>.*?\x1b\[\?25h"  # drawn, and the cursor is shown again
ACCEPTED = r"\x1b\[\?2004l[\r\n]*"  # the line editor gives the terminal back


class TerminalProgram:
    """A program on a pseudo-terminal: type, and wait for what it writes."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(environment, TERM="xterm", NO_COLOR="1")
            os.execv(arguments[0], arguments)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, timeout_s: float = 60.0) -> str:
        """Read until the pattern comes; returns all up to its end, and forgets it."""
        deadline_s = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.seen, re.DOTALL)):
            if not self._read(deadline_s - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not come; there is: {self.seen!r}")
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def wait(self) -> int:
        """Its exit code."""
        deadline_s = time.monotonic() + 60
        while self._read(deadline_s - time.monotonic()):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def _read(self, timeout_s: float) -> bool:
        readable, _, _ = select.select([self.fd], [], [], max(0.0, timeout_s))
        if not readable:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the program is gone
            return False
        if b"\x1b[6n" in data:  # "where is the cursor?"
            os.write(self.fd, b"\x1b[1;1R")
        self.seen += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def program(tiny_model: Path, tmp_path: Path) -> Iterator[TerminalProgram]:
    terminal = TerminalProgram(
        [*CHAT, "--model", str(tiny_model), *TINY, *slow(tmp_path)], XDG_STATE_HOME=str(tmp_path)
    )
    yield terminal
    terminal.close()


@pytest.mark.slow
def test_a_conversation_on_a_terminal(program, tmp_path):
    banner = program.expect("Ctrl-D leaves")
    assert "tiny-llama in this process, context of 1024 tokens" in banner
    program.expect(PROMPT)
    program.type("/set max_tokens 4\r")
    program.expect("max_tokens = 4")
    program.expect(PROMPT)
    program.type("Hello\r")
    program.expect(r"TTFT \d+ ms.* in.* 4 out · ctx \d+/1024")
    program.expect(PROMPT)
    program.type("/stats\r")
    program.expect("1 answer, 4 tokens")
    program.expect(PROMPT)
    program.type("/exit\r")
    assert program.wait() == 0
    assert "+Hello" in (tmp_path / "engine" / "chat_history").read_text()


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program(program):
    program.expect(f"Ctrl-D leaves.*{PROMPT}")
    program.type("Hello\r")
    program.expect(ACCEPTED)
    program.expect(r"[^\s\x1b]")  # the answer has begun
    program.type("\x03")
    program.expect(r"\[stopped\]")
    program.expect(PROMPT)
    program.type("/set max_tokens 3\r")
    program.expect("max_tokens = 3")
    program.expect(PROMPT)
    program.type("again\r")  # nothing of the stopped answer holds a row or pages of the engine
    program.expect(r" 3 out · ctx \d+/1024")
    program.expect(PROMPT)
    program.type("\x03")
    program.expect("Ctrl-C again leaves; so does Ctrl-D")
    program.expect(PROMPT)
    program.type("\x03")
    assert program.wait() == 130


@pytest.mark.slow
def test_ctrl_d_leaves(program):
    program.expect(f"Ctrl-D leaves.*{PROMPT}")
    program.type("\x04")
    assert program.wait() == 0
