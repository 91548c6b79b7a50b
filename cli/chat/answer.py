"""`receive`: one answer from the backend to the screen (`AnswerView`), with its times and tokens (`AnswerStats`)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ...runtime.messages import Usage
from .backend import AnswerChunk, Backend, Call
from .screen import Screen
from .session import Message
from .settings import ChatSettings

MIN_CHARS: Final = 1000
MIN_TIMES: Final = 8
_WINDOW: Final = 4000


@dataclass(frozen=True, slots=True)
class Loop:
    """The end of a text is `unit`, `times` times in a row."""

    unit: str
    times: int


def find_loop(text: str) -> Loop | None:
    """The loop at the end of a text; the shortest unit wins.

    A loop is at least MIN_CHARS characters of at least MIN_TIMES equal units. Tables, lists and JSON differ from one
    line to the next, so they are no loops.
    """
    for period in range(1, len(text) // MIN_TIMES + 1):
        length = max(MIN_CHARS, MIN_TIMES * period)
        end = len(text) - period
        if length > len(text) or text[-1] != text[end - 1]:
            continue
        if text[-length:end] == text[-length + period :]:
            unit, times = text[end:], length // period
            while text.endswith(unit * (times + 1)):
                times += 1
            return Loop(unit, times)
    return None


@dataclass(slots=True)
class AnswerStats:
    """Times and tokens of one answer.

    Attributes:
        usage: of the tokens that have arrived.
        stopped: why the chat ended it: Ctrl-C, or because it repeats itself; None: it ended by itself.
        loop: what the answer repeats, if that ended it.
    """

    started_s: float
    first_s: float | None = None
    last_s: float = 0.0
    usage: Usage | None = None
    finish_reason: str | None = None
    stopped: Literal["interrupt", "loop"] | None = None
    loop: Loop | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the question to the first text."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first."""
        if self.usage is None or self.first_s is None or self.usage.completion_tokens < 2:
            return None
        return (self.usage.completion_tokens - 1) / max(self.last_s - self.first_s, 1e-9)

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


class AnswerView:
    """One answer on the screen.

    Attributes:
        text: what has arrived.
        calls: the tool calls so far, in order; arguments grow with each chunk.
    """

    def __init__(self, screen: Screen, *, shows_text: bool = True) -> None:
        """With `shows_text` False nothing is written: the caller prints the answer at its end."""
        self._screen = screen
        self._shows_text = shows_text
        self._reasoning = False
        self.text = ""
        self.calls: list[Call] = []

    @property
    def is_empty(self) -> bool:
        """Whether neither text nor calls have arrived."""
        return not self.text and not self.calls

    def add(self, chunk: AnswerChunk) -> bool:
        """Show what is new in a chunk; returns whether there was anything."""
        if chunk.reasoning and self._shows_text:
            self._screen.reasoning(chunk.reasoning)
            self._reasoning = True
        if chunk.text:
            self._end_reasoning()
            self.text += chunk.text
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
        if self._shows_text and self.calls:
            for call in self.calls:
                self._screen.answer(f"{call_line(call)}\n")
            self._screen.end_answer()

    def stored_text(self) -> str:
        """The answer as a conversation keeps it: its text and its calls."""
        return "\n".join([*([self.text] if self.text else []), *map(call_line, self.calls)])

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


def receive(
    backend: Backend,
    messages: Sequence[Message],
    settings: ChatSettings,
    view: AnswerView,
    *,
    stops_loops: bool,
    clock: Callable[[], float] = time.monotonic,
    stats: AnswerStats | None = None,
) -> AnswerStats:
    """Show an answer until it ends, Ctrl-C is pressed, or, with `stops_loops`, it repeats itself without end.

    Args:
        view: shows the answer and keeps its text; the caller ends it.
        clock: seconds.
        stats: filled as the answer arrives, so that the caller has them after an error too.

    Raises:
        RequestError, EngineError: see `Backend.answer`.
    """
    stats = stats or AnswerStats(clock())
    tail = ""
    try:
        with contextlib.closing(backend.answer(messages, settings)) as chunks:
            for chunk in chunks:
                if view.add(chunk):
                    stats.last_s = clock()
                    stats.first_s = stats.last_s if stats.first_s is None else stats.first_s
                stats.usage = chunk.usage or stats.usage
                stats.finish_reason = chunk.finish_reason or stats.finish_reason
                if stops_loops and stats.finish_reason is None:
                    tail = (tail + chunk.text + chunk.reasoning)[-_WINDOW:]
                    stats.loop = find_loop(tail)
                    if stats.loop is not None:
                        stats.stopped = "loop"
                        break
    except KeyboardInterrupt:
        stats.stopped = "interrupt"
    return stats
