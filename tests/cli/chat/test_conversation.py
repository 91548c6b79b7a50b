"""Asking: what is shown and kept, when it is stopped, when it fails, and when the context is full."""

from __future__ import annotations

import io
import re

import pytest

from engine.cli.chat.screen import Screen, end_of_blocks
from engine.runtime.errors import EngineDeadError, RequestError


def test_an_answer_is_shown_kept_and_followed_by_its_figures(make_chat):
    chat = make_chat()
    chat.conversation.ask("one two three")
    assert chat.written() == "Hello there\nTTFT 500 ms · 2.0 tok/s · 3 in (2 cached) · 2 out · ctx 5/100\n"
    chat.conversation.ask("more")
    assert [m["content"] for m in chat.backend.seen[1]] == ["one two three", "Hello there", "more"]


def test_without_stats_there_is_the_answer_alone(make_chat):
    chat = make_chat(script=["Hi\n"])
    chat.conversation.shows_stats = False
    chat.conversation.ask("x")
    assert chat.written() == "Hi\n"


def test_an_interrupt_stops_the_answer_and_keeps_what_came(make_chat):
    chat = make_chat(script=["Hello", KeyboardInterrupt()])
    chat.conversation.ask("x")
    assert chat.backend.num_closed == 1
    assert chat.written().splitlines()[:2] == ["Hello", "[stopped]"]
    assert [m["content"] for m in chat.session.messages()] == ["x", "Hello"]
    assert chat.conversation.pending is None


def test_an_interrupt_before_the_first_word_takes_the_question_back(make_chat):
    chat = make_chat(script=[KeyboardInterrupt()])
    chat.conversation.ask("x")
    assert chat.session.messages() == []
    assert chat.conversation.pending == "x"


def test_a_stopped_answer_has_its_tokens_in_the_footer_and_the_totals(make_chat):
    chat = make_chat(script=["Hello", " there", KeyboardInterrupt()])
    chat.conversation.ask("x")
    assert "1 in (2 cached) · 2 out" in chat.written()
    assert chat.conversation.num_tokens == 2


def test_an_answer_in_a_loop_is_stopped_and_kept(make_chat):
    chat = make_chat(script=["again and again. "] * 400, max_context=None)
    chat.conversation.ask("x")
    text = chat.written()
    assert "[stopped: the answer repeats the same 17 characters" in text and "repetition_penalty" in text
    assert chat.conversation.last.usage.completion_tokens < 100 and chat.backend.num_closed == 1
    assert chat.session.messages()[-1]["content"].startswith("again and again. ")
    chat = make_chat(script=["again and again. "] * 400, max_context=None)
    chat.conversation.stops_loops = False
    chat.conversation.ask("x")
    assert "stopped" not in chat.written() and chat.conversation.num_tokens == 400


def test_an_error_is_shown_and_the_question_comes_back(make_chat):
    chat = make_chat(script=["Hel", EngineDeadError("the engine stopped")])
    chat.conversation.ask("x")
    assert chat.written() == "Hel\nthe engine stopped\n"
    assert chat.session.messages() == []
    assert chat.conversation.pending == "x"


def test_a_full_context_is_said_with_choices_and_nothing_is_sent(make_chat):
    chat = make_chat(max_context=4)
    chat.conversation.ask("one two three four")
    assert chat.backend.seen == []
    assert chat.session.messages() == []
    assert chat.conversation.pending is None, "the input line is free for a command"
    text = chat.written()
    assert "The context is full: with this question the conversation has 4 tokens, scripted reads 4" in text
    assert "/drop forgets the oldest exchange, /clear all of them" in text


def test_a_full_context_that_only_the_server_sees_is_said_with_choices(make_chat):
    full = RequestError("too long", code="context_length_exceeded")
    chat = make_chat(script=[full], counts=False)
    chat.conversation.ask("x")
    assert (
        chat.written() == "too long\nNothing was cut: /drop forgets the oldest exchange, /clear all of them; "
        "the up arrow brings the question back.\n"
    )
    assert chat.conversation.pending is None


def test_an_answer_that_fills_the_context_is_said(make_chat):
    chat = make_chat(script=["a", "b", "c"], max_context=5, finish_reason="length")
    chat.conversation.ask("one two")
    assert "The answer ends here: the context of 5 tokens is full." in chat.written()


def test_an_answer_cut_by_max_tokens_is_said(make_chat):
    chat = make_chat(finish_reason="length")
    chat.conversation.ask("x")
    assert "[stopped at max_tokens; /set max_tokens none for no limit]" in chat.written()


def test_a_context_above_80_percent_is_a_warning(make_chat):
    chat = make_chat(max_context=10)
    chat.conversation.ask("1 2 3 4 5 6")
    assert "The context is 80% full; /drop" in chat.written()
    chat = make_chat(max_context=10)
    chat.conversation.ask("1 2 3 4 5")
    assert "full" not in chat.written()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def colors(monkeypatch):
    """A terminal with colors, 20 columns wide."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "10")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(screen: Screen, stream: io.StringIO, text: str) -> str:
    """What stands on a terminal after an answer that comes by characters: erased lines are gone."""
    for character in text:
        screen.answer(character)
    screen.end_answer()
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", stream.getvalue()):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece != "\r" and not piece.startswith("\x1b[?"):
            lines[row] += piece
    return "\n".join(line.rstrip() for line in lines).rstrip()


@pytest.mark.usefixtures("colors")
def test_a_model_cannot_write_escape_sequences_to_a_terminal():
    terminal, file = Terminal(), io.StringIO()
    Screen(file).answer("a\x1b[2Jb")
    assert file.getvalue() == "a\x1b[2Jb"
    text = shown(Screen(terminal), terminal, "a\x1b[2Jb\x9bc")
    assert text == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c"


@pytest.mark.usefixtures("colors")
def test_a_terminal_gets_wrapped_lines_and_styled_markdown():
    text = "one **two** three four five six"
    terminal, plain, file = Terminal(), Terminal(), io.StringIO()
    assert shown(Screen(terminal), terminal, text) == ("one \x1b[1mtwo\x1b[0m three four\nfive six")
    unstyled = Screen(plain, styles_markdown=False)
    assert shown(unstyled, plain, text) == "one **two** three\nfour five six"
    assert shown(Screen(file), file, text) == text


@pytest.mark.usefixtures("colors")
@pytest.mark.parametrize("no_color", ["", "1"])
def test_notes_errors_and_reasoning_are_wrapped_at_words(monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    text = "repetition_penalty must lie in a range (said at once)"
    wrapped = ["repetition_penalty", "must lie in a range", "(said at once)"]
    for write in (Screen.note, Screen.error, Screen.line, Screen.heading):
        terminal = Terminal()
        write(Screen(terminal), text)
        assert re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines() == wrapped
    terminal = Terminal()
    screen = Screen(terminal)
    for piece in re.findall(r"\S+\s?", text):
        screen.reasoning(piece)
    lines = re.sub(r"\x1b\[\d*m", "", shown(screen, terminal, "Yes.")).splitlines()
    assert [line.rstrip() for line in lines] == [*wrapped, "Yes."]


@pytest.mark.usefixtures("colors")
def test_blocks_are_printed_once_and_apart_and_a_tall_one_fits_while_it_grows():
    terminal = Terminal()
    code = "".join(f"line {number}\n" for number in range(30))
    text = shown(Screen(terminal), terminal, f"a\n\nb\nc\n\n```\n{code}```\n- d\n\n  e\n")
    words = re.sub(r"\x1b\[[0-9;]*m", "", text).split()
    assert words == ["a", "b", "c", *code.split(), "•", "d", "e"]
    assert text.startswith("a\n\nb c\n\n")


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("a", ""),
        ("a\n\n", ""),
        ("a\n\nb", "a\n\n"),
        ("- a\n\n  b", ""),
        ("- a\n\n  b\n\nc", "- a\n\n  b\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n", "```\na\n\nb\n```\n"),
        ("~~~~\n~~~\n~~~~\nx", "~~~~\n~~~\n~~~~\n"),
    ],
)
def test_a_block_ends_before_the_next_one_and_with_its_fence(text, blocks):
    assert text[: end_of_blocks(text)] == blocks


def test_colors_only_on_a_terminal_and_not_under_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = Terminal(), io.StringIO()
    Screen(terminal).note("x")
    Screen(file).note("x")
    assert "\x1b[" in terminal.getvalue()
    assert file.getvalue() == "x\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Screen(plain).error("x")
    assert plain.getvalue() == "x\n"
