"""`Conversation`: sends questions to the backend, keeps the messages, reports the use of the context; never cuts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...runtime.errors import EngineError, RequestError
from .answer_view import AnswerView
from .backend import AnswerUsage, Backend
from .screen import Screen
from .session import ChatSession

WARN_CONTEXT_SHARE: Final = 0.8
_CONTEXT_CHOICES: Final = "/drop forgets the oldest exchange, /clear all of them"


@dataclass(slots=True)
class AnswerStats:
    """Times and tokens of one answer."""

    started_s: float
    first_s: float | None = None
    last_s: float = 0.0
    usage: AnswerUsage | None = None
    finish_reason: str | None = None

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


class Conversation:
    """One chat with one backend.

    Attributes:
        session: the messages and settings.
        backend: answers the questions.
        screen: where it is shown.
        shows_stats: a footer follows each answer.
        pending: a question that was not answered and goes back to the input line; `run_repl` takes it.
        last: statistics of the latest answer.
        num_answers, num_tokens: totals of this run.
    """

    def __init__(
        self,
        session: ChatSession,
        backend: Backend,
        screen: Screen,
        *,
        shows_stats: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.backend = backend
        self.screen = screen
        self.shows_stats = shows_stats
        self.pending: str | None = None
        self.last: AnswerStats | None = None
        self.num_answers = 0
        self.num_tokens = 0
        self._clock = clock

    def ask(self, question: str) -> None:
        """Show the answer to a question, and keep both. Ctrl-C keeps the part that has arrived.

        Errors are shown, not raised: the conversation goes on, with the question back on the input line.
        """
        try:
            if not self._fits(question):
                self.pending = question
                return
            self._stream(question)
        except RequestError as error:
            self.pending = question
            self.screen.end_answer()
            self.screen.error(str(error))
            if error.code == "context_length_exceeded":
                self.screen.note(f"Nothing was cut: {_CONTEXT_CHOICES}.")
        except EngineError as error:
            self.pending = question
            self.screen.end_answer()
            self.screen.error(str(error))

    def used_tokens(self, question: str | None = None) -> int | None:
        """Tokens of the conversation as the model would read it now; None if the backend cannot count."""
        messages = self.session.messages(question)
        return self.backend.count_tokens(messages) if messages else 0

    def _fits(self, question: str) -> bool:
        limit = self.backend.max_context
        used = self.used_tokens(question) if limit is not None else None
        if limit is None or used is None or used < limit:
            return True
        self.screen.error(
            f"The context is full: with this question the conversation has {used} tokens, {self.backend.model} reads "
            f"{limit}, the answer included."
        )
        self.screen.note(
            f"Nothing was sent and nothing was cut: {_CONTEXT_CHOICES}; or ask something shorter."
        )
        return False

    def _stream(self, question: str) -> None:
        stats = self.last = AnswerStats(self._clock())
        view = AnswerView(self.screen)
        interrupted = False
        try:
            with contextlib.closing(
                self.backend.answer(self.session.messages(question), self.session.settings)
            ) as chunks:
                for chunk in chunks:
                    if view.add(chunk):
                        stats.last_s = self._clock()
                        stats.first_s = stats.last_s if stats.first_s is None else stats.first_s
                    stats.usage = chunk.usage or stats.usage
                    stats.finish_reason = chunk.finish_reason or stats.finish_reason
        except KeyboardInterrupt:
            interrupted = True
        view.end()
        if not view.is_empty or not interrupted:
            self.session.add(question, view.stored_text())
        else:
            self.pending = question
        self.num_answers += 1
        self.num_tokens += stats.usage.completion_tokens if stats.usage else 0
        self._show_end(stats, interrupted=interrupted)

    def _show_end(self, stats: AnswerStats, *, interrupted: bool) -> None:
        limit = self.backend.max_context
        used = stats.usage.prompt_tokens + stats.usage.completion_tokens if stats.usage else 0
        if interrupted:
            self.screen.note("[stopped]")
        elif stats.finish_reason == "length" and limit is not None and used >= limit:
            self.screen.error(
                f"The answer ends here: the context of {limit} tokens is full. {_CONTEXT_CHOICES}."
            )
        elif stats.finish_reason == "tool_calls":
            self.screen.note("[the model calls a tool: run it, and type its result]")
        elif stats.finish_reason == "length":
            self.screen.note("[stopped at max_tokens; /set max_tokens none for no limit]")
        footer = stats.footer(limit)
        if self.shows_stats and footer:
            self.screen.note(footer)
        if limit is not None and WARN_CONTEXT_SHARE * limit <= used < limit:
            self.screen.note(f"The context is {used / limit:.0%} full; {_CONTEXT_CHOICES}.")
