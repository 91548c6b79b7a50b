"""`ask_once`: what is on a terminal, in a pipe or as JSON when an answer breaks off."""

from __future__ import annotations

import io

import pytest

from engine.cli.chat.conversation import ask_once
from engine.cli.chat.screen import Screen
from engine.runtime.errors import ServerError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "as_json", "written"),
    [
        (Terminal(), False, "The sky is **blue"),
        (io.StringIO(), False, "The sky is **blue\n"),
        (Terminal(), True, ""),
    ],
)
def test_an_answer_that_breaks_off_is_written_to_its_last_word(make_chat, monkeypatch, out, as_json, written):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    chat = make_chat(script=("The sky is ", "**blue", ServerError("the stream broke off")))
    with pytest.raises(ServerError, match="broke off"):
        ask_once(
            chat.session, chat.backend, Screen(out, io.StringIO()), "Why?", as_json=as_json, shows_stats=False
        )
    if out.isatty() and not as_json:  # the last block is printed, and the live region is erased
        assert f"{written} " in out.getvalue().replace("\n", " ")
    else:
        assert out.getvalue() == written
