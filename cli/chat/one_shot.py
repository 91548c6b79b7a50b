"""`ask_once`: one question, one answer on standard output and nothing else there."""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any, TextIO

from ...runtime.errors import ConfigError, EngineError, RequestError
from ...runtime.text import decode_utf8
from ..exit_codes import ExitCode
from .backend import Backend
from .receiving import AnswerStats, Stopped, receive
from .screen import AnswerView, Screen, call_line
from .session import ChatSession


def ask_once(
    session: ChatSession,
    backend: Backend,
    screen: Screen,
    question: str,
    *,
    as_json: bool,
    shows_stats: bool,
    stops_loops: bool = True,
) -> int:
    """Stream the answer, or with `as_json` write one JSON object at the end.

    Returns:
        The exit code: 0, or 130 when Ctrl-C stopped the answer (the part that had arrived is written).
    """
    view = AnswerView(screen, shows_text=not as_json)
    messages, settings = session.messages(question), session.settings
    try:
        stats = receive(backend, messages, settings, view, stops_loops=stops_loops)
    except EngineError:
        screen.end_answer()  # its last words may be held back, and the error begins a line
        raise
    if as_json:
        screen.answer(json.dumps(_document(backend, stats, view), ensure_ascii=False))
    view.end()
    if stats.stopped is Stopped.LOOP:
        screen.note(stats.loop_note())
    if shows_stats:
        screen.note(stats.footer(backend.max_context))
    return ExitCode.INTERRUPTED if stats.stopped is Stopped.INTERRUPT else ExitCode.SUCCESS


def read_question(words: list[str], stdin: TextIO) -> str | None:
    """The question from the command line, followed by the piped input; None if there is neither.

    Standard input is read only if it is a pipe or a file: a program that runs this command may
    pass on a terminal, a socket or nothing.

    Raises:
        ConfigError: the input is not UTF-8.
        RequestError: it is empty.
    """
    question = " ".join(words).strip()
    piped = ""
    mode = _mode_of(stdin)
    if stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
        # The bytes, because a text stream decodes them as the locale demands.
        text = decode_utf8(stdin.buffer.read(), "standard input")
        piped = text.replace("\r\n", "\n").replace("\r", "\n").strip()
        if not (question or piped):
            raise RequestError("there is no question: standard input is empty")
    return "\n\n".join(part for part in (question, piped) if part) or None


def names_a_model(words: list[str]) -> bool:
    """Whether the question is one word that names a model, as `ollama run NAME` has it. Looks at nothing but names."""
    from ...models.hub.built_in.models import find_built_in
    from ...models.source import hub_name_of

    if len(words) != 1:
        return False
    word = words[0]
    if find_built_in(word) or word.endswith(".gguf") or os.path.isfile(os.path.join(word, "config.json")):
        return True
    try:
        return hub_name_of(word) is not None
    except ConfigError:
        return False


def _mode_of(stream: TextIO) -> int:
    try:
        return os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # closed, or no real file
        return 0


def _document(backend: Backend, stats: AnswerStats, view: AnswerView) -> dict[str, Any]:
    usage = stats.usage
    calls = {"tool_calls": [json.loads(call_line(call)) for call in view.calls]} if view.calls else {}
    return {
        "model": backend.model,
        "answer": view.text,
        **calls,
        "finish_reason": "repetition" if stats.stopped is Stopped.LOOP else stats.finish_reason,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "cached_tokens": usage.cached_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else None,
        "ttft_s": stats.ttft_s,
        "tokens_per_s": stats.tokens_per_s,
    }


def interactive_terminal() -> bool:
    """Whether a conversation is possible: standard input and output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
