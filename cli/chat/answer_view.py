"""`AnswerView`: shows one answer as it arrives: reasoning dimmed, text, and tool calls as blocks."""

from __future__ import annotations

import json

from .backend import AnswerChunk, Call
from .screen import Screen


class AnswerView:
    """One answer on the screen.

    Attributes:
        parts: the text so far.
        calls: the tool calls so far, in order; arguments grow with each chunk.
    """

    def __init__(self, screen: Screen, *, shows_text: bool = True) -> None:
        """With `shows_text` False nothing is written: the caller prints the answer at its end."""
        self._screen = screen
        self._shows_text = shows_text
        self._reasoning = False
        self.parts: list[str] = []
        self.calls: list[Call] = []

    @property
    def text(self) -> str:
        """The text of the answer so far."""
        return "".join(self.parts)

    @property
    def is_empty(self) -> bool:
        """Whether neither text nor calls have arrived."""
        return not self.parts and not self.calls

    def add(self, chunk: AnswerChunk) -> bool:
        """Show what is new in a chunk; returns whether there was anything."""
        if chunk.reasoning and self._shows_text:
            self._screen.reasoning(chunk.reasoning)
            self._reasoning = True
        if chunk.text:
            self._end_reasoning()
            self.parts.append(chunk.text)
            if self._shows_text:
                self._screen.answer(chunk.text)
        for piece in chunk.calls:
            if piece.number >= len(self.calls):
                self.calls.append(piece)
            else:
                known = self.calls[piece.number]
                self.calls[piece.number] = known._replace(
                    name=known.name + piece.name, arguments=known.arguments + piece.arguments
                )
        return bool(chunk.text or chunk.reasoning or chunk.calls)

    def end(self) -> None:
        """The answer is complete: end its line, and write its calls, one JSON object per line."""
        self._end_reasoning()
        self._screen.end_answer()
        if self._shows_text:
            for call in self.calls:
                self._screen.answer(f"{call_line(call)}\n")

    def stored_text(self) -> str:
        """The answer as a conversation keeps it: its text and its calls."""
        lines = [self.text] if self.text else []
        return "\n".join([*lines, *map(call_line, self.calls)])

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning = False
            self._screen.end_reasoning()


def call_line(call: Call) -> str:
    """A call as JSON, with its arguments as an object if they are one."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:  # the answer was cut
        arguments = call.arguments
    return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
