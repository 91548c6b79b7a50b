"""`Answer`: one answer from the backend to the screen, with its times and tokens; `find_loop`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ...runtime.messages import Usage
from ...runtime.text import LOOP
from .backend import AnswerChunk, Backend, Call
from .screen import Screen
from .session import Message
from .settings import ChatSettings

MIN_RATE_S: Final = 0.02
"""From the first to the last piece of an answer. In less time several tokens came in one piece, maybe all."""


class Loop(NamedTuple):
    """The end of a text is `unit`, `times` times in a row."""

    unit: str
    times: int


def find_loop(text: str) -> Loop | None:
    """The loop at the end of a text; the shortest unit wins.

    See `LoopRule`. Tables, lists and JSON differ from one line to the next, so they are no loops.
    """
    for period in range(1, len(text) // LOOP.min_times + 1):
        length = max(LOOP.min_chars, LOOP.min_times * period)
        end = len(text) - period
        if length > len(text) or text[-1] != text[end - 1]:
            continue
        if text[-length:end] == text[-length + period :]:
            unit, times = text[end:], length // period
            while text.endswith(unit * (times + 1)):
                times += 1
            return Loop(unit, times)
    return None


class Answer:
    """One answer, shown as it arrives.

    Attributes:
        text: the part that has arrived.
        calls: the tool calls so far, in order; arguments grow with each chunk.
        usage: of the tokens that have arrived.
        interrupted: Ctrl-C ended it.
        loop: what it repeats, if the chat ended it for that.
    """

    def __init__(
        self, screen: Screen, *, shows_text: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """With `shows_text` False nothing is written: the caller prints the answer. `clock`: seconds."""
        self._screen = screen
        self._shows_text = shows_text
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._last_s = 0.0
        self.text = ""
        self.calls: list[Call] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.interrupted = False
        self.loop: Loop | None = None

    def receive(
        self, backend: Backend, messages: Sequence[Message], settings: ChatSettings, *, stops_loops: bool
    ) -> None:
        """Show the answer until it ends, Ctrl-C is pressed, or, with `stops_loops`, it repeats itself without end.

        Raises:
            RequestError, EngineError: see `Backend.answer`.
        """
        tail = ""
        try:
            with contextlib.closing(backend.answer(messages, settings)) as chunks:
                for chunk in chunks:
                    self.add(chunk)
                    if stops_loops and self.finish_reason is None:
                        tail = (tail + chunk.text + chunk.reasoning)[-LOOP.window_chars :]
                        self.loop = find_loop(tail)
                        if self.loop is not None:
                            break
        except KeyboardInterrupt:
            self.interrupted = True

    def add(self, chunk: AnswerChunk) -> None:
        """Show and keep a chunk."""
        self.text += chunk.text
        if self._shows_text:
            self._screen.reasoning(chunk.reasoning)
            self._screen.answer(chunk.text)
        for piece in chunk.calls:
            if piece.number >= len(self.calls):
                self.calls.append(piece)
            else:
                known = self.calls[piece.number]
                self.calls[piece.number] = known._replace(
                    name=known.name + piece.name, arguments=known.arguments + piece.arguments
                )
        if chunk.text or chunk.reasoning or chunk.calls:
            self._last_s = self._clock()
            self._first_s = self._last_s if self._first_s is None else self._first_s
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason

    def end(self) -> None:
        """End the line of the complete answer, and write its calls, one JSON object per line."""
        self._screen.end_answer()
        if self._shows_text and self.calls:
            for call in self.calls:
                self._screen.answer(f"{call_line(call)}\n")
            self._screen.end_answer()

    def stored_text(self) -> str:
        """The answer as a conversation keeps it: its text and its calls."""
        return "\n".join([*([self.text] if self.text else []), *map(call_line, self.calls)])

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the question to the first text."""
        return None if self._first_s is None else self._first_s - self._started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first; None for an answer that came in too short a time to have one."""
        if self.usage is None or self._first_s is None or self.usage.completion_tokens < 2:
            return None
        elapsed_s = self._last_s - self._first_s
        return None if elapsed_s < MIN_RATE_S else (self.usage.completion_tokens - 1) / elapsed_s

    def footer(self, max_context: int | None) -> str:
        """`TTFT 41 ms · 62.3 tok/s · 512 in (480 cached) · 211 out · ctx 723/32768`."""
        parts = []
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        if self.usage is not None:
            cached = f" ({self.usage.cached_tokens} cached)" if self.usage.cached_tokens else ""
            used = self.usage.prompt_tokens + self.usage.completion_tokens
            parts.append(f"{self.usage.prompt_tokens} in{cached}")
            parts.append(f"{self.usage.completion_tokens} out")
            parts.append(f"ctx {used}/{max_context}" if max_context else f"ctx {used}")
        return " · ".join(parts)

    def loop_note(self) -> str:
        """Note for an answer that was stopped because it repeats itself."""
        assert self.loop is not None
        return (
            f"[stopped: the answer repeats the same {len(self.loop.unit)} characters {self.loop.times} times; a higher "
            f"temperature or repetition_penalty 1.1 helps, --no-stop-loops lets it go on]"
        )


def call_line(call: Call) -> str:
    """A call as JSON, with its arguments as an object if they are one."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:  # the answer was cut
        arguments = call.arguments
    return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
