"""Lines: when Enter sends, what is sent, and what Tab offers."""

from __future__ import annotations

import contextlib
import os
import pty
import stat
import termios

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from engine.cli.chat.line_editor import LineEditor, SlashCompleter, is_complete, typed_text, unwrap

ENTER, CTRL_C, CTRL_D, ALT_ENTER = "\r", "\x03", "\x04", "\x1b\r"


@pytest.mark.parametrize(
    ("text", "complete", "message"),
    [
        ("hello", True, "hello"),
        ("  hello ", True, "hello"),
        ("one\\", False, None),
        ("one\\\ntwo", True, "one\ntwo"),
        ('"""one', False, None),
        ('"""', False, None),
        ('"""one\ntwo"""', True, "one\ntwo"),
        ('"""\none\n  two\n"""', True, "one\n  two"),
        ('"""/etc/passwd"""', True, "//etc/passwd"),
        ('say """x""" loud', True, 'say """x""" loud'),
    ],
)
def test_several_lines(text, complete, message):
    assert is_complete(text) is complete
    if message is not None:
        assert unwrap(text) == message


def offered(text):
    return [c.text for c in SlashCompleter().get_completions(Document(text, len(text)), CompleteEvent())]


def test_tab_offers_commands_and_their_words(tmp_path):
    assert offered("/s") == ["/set", "/show", "/system", "/save", "/stats"]
    assert offered("/set t") == ["temperature", "top_p", "top_k"]
    assert offered("/stats o") == ["on", "off"]
    assert offered("hello /s") == []
    assert offered("//s") == []
    (tmp_path / "chat-one.json").touch()
    assert offered(f"/load {tmp_path}/ch") == ["at-one.json"]


def typed(keys, history=None):
    """The messages that come of these key presses."""
    with create_pipe_input() as terminal:
        editor = LineEditor(history, terminal_input=terminal, terminal_output=DummyOutput())
        messages = []
        for press in keys:
            terminal.send_text(press)
            messages.append(editor.read())
        return messages


def test_keys_make_messages():
    assert typed(["hi" + ENTER]) == ["hi"]
    assert typed(["one\\" + ENTER + "two" + ENTER]) == ["one\ntwo"]
    assert typed(['"""one' + ENTER + 'two"""' + ENTER]) == ["one\ntwo"]
    assert typed(["one" + ALT_ENTER + "two" + ENTER]) == ["one\ntwo"]
    assert typed(["\x1b[200~one\ntwo\x1b[201~" + ENTER]) == ["one\ntwo"]  # a bracketed paste


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (b"next\r", "next"),
        (b"one\rtwo", "one\ntwo"),
        (b"ab\x7fc\x1b[A\x1bOP\x1b[200~d\x1b[201~", "acd"),
        ("grün\x00".encode(), "grün"),
        (b"\x7f\r", ""),
    ],
)
def test_keys_during_an_answer_become_text(keys, text):
    assert typed_text(keys) == text


def test_what_is_typed_during_an_answer_begins_the_next_message():
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, encoding="utf-8") as stdin:
        with create_pipe_input() as keys:
            editor = LineEditor(None, terminal_output=DummyOutput(), terminal_input=keys, held_terminal=stdin)
            with editor.held():
                os.write(controller, b"and then?\r")
            keys.send_text("!" + ENTER)
            assert editor.read() == "and then?!"
            with editor.held():
                pass
            keys.send_text("ok" + ENTER)
            assert editor.read() == "ok"
        assert termios.tcgetattr(stdin)[3] & termios.ECHO
    with contextlib.suppress(OSError):
        assert b"then" not in os.read(controller, 4096), "nothing was echoed"
    os.close(controller)


def test_ctrl_c_while_typed_keys_are_read_keeps_the_echo(monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    controller, terminal = pty.openpty()
    with os.fdopen(terminal, encoding="utf-8") as stdin, create_pipe_input() as keys:
        editor = LineEditor(None, terminal_output=DummyOutput(), terminal_input=keys, held_terminal=stdin)
        with pytest.raises(KeyboardInterrupt), editor.held():
            monkeypatch.setattr("engine.cli.chat.line_editor.select.select", interrupt)
        assert termios.tcgetattr(stdin)[3] & termios.ECHO
    os.close(controller)


def test_ctrl_c_and_ctrl_d():
    with pytest.raises(KeyboardInterrupt):
        typed(["half a line" + CTRL_C])
    with pytest.raises(EOFError):
        typed([CTRL_D])


def test_history_outlives_the_program_and_is_private(tmp_path):
    path = tmp_path / "state" / "chat_history"
    typed(["a question" + ENTER], path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert typed(["\x1b[A" + ENTER], path) == ["a question"]  # arrow up


def test_a_history_that_cannot_be_written_is_no_obstacle(tmp_path):
    (tmp_path / "file").touch()
    assert typed(["hi" + ENTER], tmp_path / "file" / "history") == ["hi"]


def test_bytes_that_are_not_utf8_are_replaced_in_the_message_and_in_the_history(tmp_path):
    path = tmp_path / "history"
    with create_pipe_input() as terminal:
        editor = LineEditor(path, terminal_input=terminal, terminal_output=DummyOutput())
        terminal.send_bytes(b"caf\xe9 \xf0\x9f\x98\x80\r")
        assert editor.read() == "caf\N{REPLACEMENT CHARACTER} 😀"
    assert path.read_text(encoding="utf-8").endswith("+caf\N{REPLACEMENT CHARACTER} 😀\n")
