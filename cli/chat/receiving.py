"""`AnswerStats` and `receive`: one answer from the backend to the screen, with its times and tokens."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from .backend import AnswerUsage, Backend
from .screen import AnswerView
from .session import Message
from .settings import ChatSettings

MIN_CHARS: Final = 1000
MIN_TIMES: Final = 8
_WINDOW: Final = 4000
_STEP: Final = 200
"""New characters between two searches."""


@dataclass(frozen=True, slots=True)
class Loop:
    """The end of a text is `unit`, `times` times in a row."""

    unit: str
    times: int


class Repetition:
    """Searches the end of a growing text for a unit that is repeated.

    A loop is at least MIN_CHARS characters of at least MIN_TIMES equal units; the longest unit that is noticed has
    _WINDOW / MIN_TIMES characters. Tables, lists and JSON differ from one line to the next, so they are no loops.
    """

    def __init__(self) -> None:
        self._tail = ""
        self._num_new = 0

    def add(self, text: str) -> Loop | None:
        """Add the next piece; returns the loop at the end of the text, if there is one."""
        self._tail = (self._tail + text)[-_WINDOW:]
        self._num_new += len(text)
        if self._num_new < _STEP:
            return None
        self._num_new = 0
        return find_loop(self._tail)


def find_loop(text: str) -> Loop | None:
    """The loop at the end of a text; the shortest unit wins.

    Source: the prefix function of Knuth, Morris and Pratt, over the reversed text. O(len(text)).
    """
    reverse = text[::-1]
    borders = [0] * len(reverse)
    for end in range(1, len(reverse)):
        border = borders[end - 1]
        while border and reverse[end] != reverse[border]:
            border = borders[border - 1]
        borders[end] = border + (reverse[end] == reverse[border])
        length = end + 1
        period = length - borders[end]
        if length >= MIN_CHARS and length >= MIN_TIMES * period:
            return Loop(text[len(text) - period :], length // period)
    return None


class Stopped(enum.Enum):
    """Reason why the chat stopped an answer."""

    INTERRUPT = "Ctrl-C"
    LOOP = "loop"


@dataclass(slots=True)
class AnswerStats:
    """Times and tokens of one answer.

    Attributes:
        usage: of the tokens that have arrived.
        stopped: why the chat ended it; None: it ended by itself.
        loop: what the answer repeats, if that ended it.
    """

    started_s: float
    first_s: float | None = None
    last_s: float = 0.0
    usage: AnswerUsage | None = None
    finish_reason: str | None = None
    stopped: Stopped | None = None
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
        backend, messages, settings: the request.
        view: shows the answer and keeps its text; the caller ends it.
        stops_loops: whether to stop an answer that repeats itself.
        clock: seconds.
        stats: filled as the answer arrives, so that the caller has them after an error too.

    Raises:
        RequestError, EngineError: see `Backend.answer`.
    """
    stats = stats or AnswerStats(clock())
    repetition = Repetition()
    try:
        with contextlib.closing(backend.answer(messages, settings)) as chunks:
            for chunk in chunks:
                if view.add(chunk):
                    stats.last_s = clock()
                    stats.first_s = stats.last_s if stats.first_s is None else stats.first_s
                stats.usage = chunk.usage or stats.usage
                stats.finish_reason = chunk.finish_reason or stats.finish_reason
                stats.loop = repetition.add(chunk.text + chunk.reasoning) if stops_loops else None
                if stats.loop is not None and stats.finish_reason is None:
                    stats.stopped = Stopped.LOOP
                    break
    except KeyboardInterrupt:
        stats.stopped = Stopped.INTERRUPT
    return stats
