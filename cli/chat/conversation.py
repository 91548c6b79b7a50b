"""`Conversation` keeps the messages, and reports the use of the context; never cuts. `ask_once`: a single question."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from ...runtime.errors import EngineError, RequestError
from ...runtime.text import counted
from ..exit_codes import ExitCode
from .answer import Answer, call_line
from .backend import Backend, HttpBackend
from .images import content_of, image_of_file
from .screen import Screen
from .session import ChatSession, Content, Part

WARN_CONTEXT_SHARE: Final = 0.8
_CONTEXT_CHOICES: Final = "/drop forgets the oldest exchange, /clear all of them"
_BRING_BACK: Final = "the up arrow brings the question back"


class Conversation:
    """One chat with one backend.

    Attributes:
        shows_stats: a footer follows each answer.
        stops_loops: an answer that repeats itself without end is stopped.
        attached: texts of files that go with the next question.
        images: those that go with it.
        own_files: saved chats that this one has written or read; `/save` replaces them without a question.
        pending: a question that goes back to the input line; `run_repl` takes it.
        num_answers, num_tokens: totals of this run.
    """

    def __init__(
        self,
        session: ChatSession,
        backend: Backend,
        screen: Screen,
        *,
        shows_stats: bool = True,
        stops_loops: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.backend = backend
        self.screen = screen
        self.shows_stats = shows_stats
        self.stops_loops = stops_loops
        self.attached: list[str] = []
        self.images: list[Part] = []
        self.own_files: set[Path] = set()
        self.pending: str | None = None
        self.last: Answer | None = None
        self.num_answers = 0
        self.num_tokens = 0
        self._clock = clock
        if isinstance(backend, HttpBackend):
            backend.on_wait = screen.note

    @property
    def title(self) -> str:
        """The model, its place and its context."""
        backend = self.backend
        context = f", context of {backend.max_context} tokens" if backend.max_context else ""
        return f"{backend.model} {backend.where}{context}"

    def ask(self, question: str) -> None:
        """Show the answer to a question, and keep both. Ctrl-C keeps the part that has arrived.

        Errors are shown, not raised: the conversation goes on. A question that the user can send again as it is comes
        back to the input line; one that needs a command first does not, since it would be in the way.
        """
        message = content_of("\n\n".join([question, *self.attached]), self.images)
        try:
            if not self._fits(message):
                return
            self._stream(question, message)
        except RequestError as error:
            self.screen.end_answer()
            self.screen.error(str(error))
            if error.code == "context_length_exceeded":
                self.screen.note(f"Nothing was cut: {_CONTEXT_CHOICES}; {_BRING_BACK}.")
            elif _is_about_images(error):
                self._drop_refused(error, question)
        except EngineError as error:
            self.pending = question
            self.screen.end_answer()
            self.screen.error(str(error))

    def attach_image(self, path: Path) -> None:
        """Let an image go with the next question.

        Raises:
            RequestError: it is no image, or the model sees none.
        """
        check_sight(self.backend)
        self.images.append(image_of_file(path))
        self.screen.note(f"The image {path.name} goes with the next question.")

    def _drop_refused(self, error: RequestError, question: str) -> None:
        """Drop the image that the server refuses, or all of the question if the error does not say which."""
        found = re.match(r"messages\[(\d+)\](?:\.content\[(\d+)\])?", error.param or "")
        if found is not None and int(found[1]) < len(self.session.messages()):
            self.screen.note(f"That is an earlier image of the conversation: {_CONTEXT_CHOICES}.")
            return
        if not self.images:
            return
        if found is not None and found[2] and int(found[2]) < len(self.images):
            del self.images[int(found[2])]
        else:
            self.images.clear()
        left = f" ({counted(len(self.images), 'other')} left)" if self.images else ""
        self.screen.note(
            f"The image is dropped{left}; the question is in the input line, to be sent without it."
        )
        self.pending = question

    def used_tokens(self, question: Content | None = None) -> int | None:
        """Tokens of the conversation as the model would read it now; None if the backend cannot count."""
        messages = self.session.messages(question)
        return self.backend.count_tokens(messages) if messages else 0

    def _fits(self, question: Content) -> bool:
        limit = self.backend.max_context
        used = self.used_tokens(question) if limit is not None else None
        if limit is None or used is None or used < limit:
            return True
        self.screen.error(
            f"The context is full: with this question the conversation has {used} tokens, {self.backend.model} reads "
            f"{limit}, the answer included."
        )
        self.screen.note(
            f"Nothing was sent and nothing was cut: {_CONTEXT_CHOICES}, and {_BRING_BACK}; or ask something shorter."
        )
        return False

    def _stream(self, question: str, message: Content) -> None:
        answer = self.last = Answer(self.screen, clock=self._clock)
        messages = self.session.messages(message)
        answer.receive(self.backend, messages, self.session.settings, stops_loops=self.stops_loops)
        answer.end()
        if answer.text or answer.calls or not (answer.interrupted or answer.loop):
            self.session.add(message, answer.stored_text())
            self.attached.clear()
            self.images.clear()
        else:
            self.pending = question
        self.num_answers += 1
        self.num_tokens += answer.usage.completion_tokens if answer.usage else 0
        self._show_end(answer)

    def _show_end(self, answer: Answer) -> None:
        limit = self.backend.max_context
        used = answer.usage.prompt_tokens + answer.usage.completion_tokens if answer.usage else 0
        if answer.interrupted:
            self.screen.note("[stopped]")
        elif answer.loop:
            self.screen.note(answer.loop_note())
        elif answer.finish_reason == "length" and limit is not None and used >= limit:
            self.screen.error(
                f"The answer ends here: the context of {limit} tokens is full. {_CONTEXT_CHOICES}."
            )
        elif answer.finish_reason == "tool_calls":
            self.screen.note("[the model calls a tool: run it, and type its result]")
        elif answer.finish_reason == "length":
            self.screen.note("[stopped at max_tokens; /set max_tokens none for no limit]")
        footer = answer.footer(limit)
        if self.shows_stats and footer:
            self.screen.note(footer)
        if limit is not None and WARN_CONTEXT_SHARE * limit <= used < limit:
            self.screen.note(f"The context is {used / limit:.0%} full; {_CONTEXT_CHOICES}.")


def _is_about_images(error: RequestError) -> bool:
    """Whether a server refuses images for good; a busy one (429) may take them later."""
    texts = (error.param, error.code, str(error))
    return error.status != HTTPStatus.TOO_MANY_REQUESTS and any(
        "image" in (text or "").lower() for text in texts
    )


def check_sight(backend: Backend) -> None:
    """Check that the model sees images, if that is known.

    Raises:
        RequestError: it does not.
    """
    if backend.sees_images() is False:
        raise RequestError(
            f"{backend.model} {backend.where} sees no images; chat with a model that does, such as SmolVLM: "
            "docs/images.md lists them"
        )


def ask_once(
    session: ChatSession,
    backend: Backend,
    screen: Screen,
    question: Content,
    *,
    as_json: bool,
    shows_stats: bool,
    stops_loops: bool = True,
) -> int:
    """Stream the answer to standard output, or with `as_json` write one JSON object at the end.

    Returns:
        The exit code: 0, or 130 when Ctrl-C stopped the answer (the part that had arrived is written).
    """
    answer = Answer(screen, shows_text=not as_json)
    try:
        answer.receive(backend, session.messages(question), session.settings, stops_loops=stops_loops)
    except EngineError:
        screen.end_answer()  # its last words may be held back, and the error begins a line
        raise
    if as_json:
        usage = answer.usage
        calls = {"tool_calls": [json.loads(call_line(call)) for call in answer.calls]} if answer.calls else {}
        document = {
            "model": backend.model,
            "answer": answer.text,
            **calls,
            "finish_reason": "repetition" if answer.loop else answer.finish_reason,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "completion_tokens": usage.completion_tokens if usage else None,
            "ttft_s": answer.ttft_s,
            "tokens_per_s": answer.tokens_per_s,
        }
        screen.answer(json.dumps(document, ensure_ascii=False))
    answer.end()
    if answer.loop:
        screen.note(answer.loop_note())
    if shows_stats:
        screen.note(answer.footer(backend.max_context))
    return ExitCode.INTERRUPTED if answer.interrupted else ExitCode.SUCCESS
