"""`Backend`: the model that answers the chat, in this process (`InProcessBackend`) or on a server (`HttpBackend`)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import httpx

from ...launch.startup_display import StartupDisplay
from ...runtime.config.config_sources import MergedConfig, from_arguments
from ...runtime.errors import EngineError, RequestError, ServerError
from ...runtime.messages import Usage
from ...runtime.text import counted, replace_surrogates
from ..server_client import QUICK_TIMEOUT_S, ServerConnection, error_from, error_of, is_busy, wait_s
from .session import Message
from .settings import ChatSettings

if TYPE_CHECKING:
    from ...launch.resolve.prepare import Prepared

# One conversation at a time; the KV of a second sequence keeps the old conversation cached after /clear or /regen.
BASE_SETTINGS: Final = from_arguments({"max_running_requests": 2})
_START_ONE: Final = "start one with `engine serve`, or leave out --url to run in this process"
_MAX_BUSY_S: Final = 60.0
"""Longest time of sending a question again while the server says when (`Retry-After`)."""
_MIN_WAIT_S: Final = 0.5
"""Shortest pause, where a server says 0."""


class Call(NamedTuple):
    """A tool call, or a piece of one: pieces of the same `number` are joined."""

    number: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A piece of an answer; usage and finish reason come with the last pieces, if the backend reports them."""

    text: str
    usage: Usage | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Backend(Protocol):
    """A model that answers.

    Attributes:
        model: its name.
        where: `in this process`, `at http://...`.
        max_context: tokens of prompt and answer together; None if unknown.
    """

    model: str
    where: str
    max_context: int | None

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        """Stream the answer; closing the generator stops it, in the engine too.

        Raises:
            RequestError: this conversation or these settings cannot be answered.
            EngineError: the engine or the server failed.
        """
        ...

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Tokens of the rendered conversation; None if the backend cannot count."""
        ...

    def sees_images(self) -> bool | None:
        """Whether questions may have images; None if the backend does not know."""
        ...

    def about(self) -> str:
        """Quantization or precision, device, address of the page: those that are known, for the banner."""
        ...

    def close(self) -> None:
        """Release the backend."""
        ...


class InProcessBackend:
    """A backend over `LLM`."""

    def __init__(self, merged: MergedConfig, display: StartupDisplay, form: Mapping[str, Any]) -> None:
        """Load the model; `form`: of the answers.

        Raises:
            ConfigError: the model cannot run on this machine.
        """
        display.step("import the engine")
        from ...offline.llm import LLM

        def check(prepared: Prepared) -> None:  # before weights are read
            if prepared.spec.pooling is not None:
                raise RequestError(_why_it_cannot_chat(prepared.model_name, prepared.spec.pooling.task))
            quantization = prepared.spec.quantization
            self._weights = str(prepared.config.model.dtype if quantization is None else quantization.method)

        self._llm = LLM.from_config(merged, on_step=display.step, on_download=display.download, check=check)
        self._form = form
        self.model = self._llm.model_name
        self.where = "in this process"
        self.max_context: int | None = self._llm.max_model_len

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        for chunk in self._llm.chat(messages, settings.body(), stream=True, **self._form):
            if chunk.error is not None:
                raise EngineError(chunk.error)
            yield AnswerChunk(
                chunk.text,
                chunk.usage,
                chunk.finish_reason,
                reasoning=chunk.reasoning,
                calls=tuple(Call(call.index, call.name, call.arguments) for call in chunk.tool_calls),
            )

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        return len(self._llm.render_chat(messages))

    def sees_images(self) -> bool | None:
        return self._llm.sees_images

    def about(self) -> str:
        model = self._llm.config.model
        threads = f", {counted(model.num_threads, 'thread')}" if model.device == "cpu" else ""
        return f"{self._weights} on {model.device}{threads}"

    def close(self) -> None:
        self._llm.close()


class HttpBackend:
    """A backend over `POST /v1/chat/completions`.

    Attributes:
        on_wait: called with a line before a question is sent again to a busy server.
    """

    on_wait: Callable[[str], None] = staticmethod(lambda _line: None)

    def __init__(
        self, url: str, *, form: Mapping[str, Any], api_key: str | None = None, model: str | None = None
    ) -> None:
        """Connect; see `ServerConnection`. `form`: of the answers.

        Raises:
            RequestError: the model generates no text, too.
        """
        self._server = ServerConnection(url, api_key=api_key, model=model, how_to_start=_START_ONE)
        self._form = form
        self.model, self.where = self._server.model, self._server.where
        task, length = (self._server.entry.get(key) for key in ("task", "max_model_len"))
        if task in ("embed", "score"):
            self.close()
            message = _why_it_cannot_chat(f"{self.model} {self.where}", task)
            raise RequestError(message, code="unsupported_task")
        self.max_context = length if isinstance(length, int) else None
        self._counts_tokens = True
        # A usage in each chunk, for answers that are stopped; servers that report their context know the option.
        counts = {} if self.max_context is None else {"continuous_usage_stats": True}
        self._stream_options = {"include_usage": True, **counts}

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        body = {
            **settings.body(),
            **self._form,
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": self._stream_options,
        }
        with contextlib.ExitStack() as stack:
            try:
                response = self._send(body, stack)
                finished = False
                for event in _events(response):
                    chunk = _chunk_of(event)
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
                if not finished:
                    raise ServerError(
                        f"{self._server.base}: the stream broke off before the answer was complete"
                    )
            except httpx.HTTPError as error:
                raise self._server.failure(error) from None

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Servers without `/tokenize` are asked once."""
        if not self._counts_tokens:
            return None
        count = self._ask("/tokenize", {"messages": list(messages)}).get("count")
        self._counts_tokens = isinstance(count, int)
        return count if isinstance(count, int) else None

    def sees_images(self) -> bool | None:
        capabilities = self._ask("/api/show", {}).get("capabilities")
        return "vision" in capabilities if isinstance(capabilities, list) else None

    def about(self) -> str:
        details = self._ask("/api/show", {}).get("details")
        level = details.get("quantization_level") if isinstance(details, Mapping) else None
        parts = [str(level)] if level else []
        with contextlib.suppress(httpx.HTTPError):
            page = self._server.client.get(f"{self._server.base}/", timeout=QUICK_TIMEOUT_S)
            if page.is_success and "text/html" in page.headers.get("content-type", ""):
                parts.append(f"page at {self._server.base}/")
        return ", ".join(parts)

    def close(self) -> None:
        self._server.client.close()

    def _send(self, body: Mapping[str, Any], stack: contextlib.ExitStack) -> httpx.Response:
        """Send a question; again, while a server that is busy says when."""
        last_s = time.monotonic() + _MAX_BUSY_S
        while True:
            with contextlib.ExitStack() as attempt:
                url = f"{self._server.base}/v1/chat/completions"
                response = attempt.enter_context(self._server.client.stream("POST", url, json=body))
                if response.status_code == httpx.codes.OK:
                    stack.push(attempt.pop_all())
                    return response
                response.read()
                wait = wait_s(response)
                if not is_busy(response) or time.monotonic() + wait > last_s:
                    raise error_of(response)
            self.on_wait(f"waiting {wait:g} s for the server: {error_of(response)}")
            time.sleep(max(wait, _MIN_WAIT_S))

    def _ask(self, path: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of an endpoint that some servers lack; {} then."""
        body = {"model": self.model, **fields}
        try:
            response = self._server.client.post(
                f"{self._server.base}{path}", json=body, timeout=QUICK_TIMEOUT_S
            )
            answer = response.json() if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError):
            answer = None
        return answer if isinstance(answer, Mapping) else {}


def _why_it_cannot_chat(model: str, task: str) -> str:
    """The sentence about a model that generates no text, with the command for it. `task`: "embed" or "score"."""
    does, command = ("makes vectors of texts", "embed") if task == "embed" else ("scores texts", "rerank")
    return f"{model} {does} and cannot chat; use `engine {command}` with it, or chat with another model"


def _events(response: httpx.Response) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    data: list[str] = []
    for line in response.iter_lines():
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            text, data = "\n".join(data), []
            if text == "[DONE]":
                return
            try:
                event = json.loads(text)
            except ValueError:
                raise ServerError("the server sent an event that is not JSON") from None
            if isinstance(event, Mapping):
                yield event


def _chunk_of(event: Mapping[str, Any]) -> AnswerChunk:
    if "error" in event:
        raise error_from(event["error"], status=500)
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return AnswerChunk(
        replace_surrogates(delta.get("content") or ""),
        _usage_of(event.get("usage")),
        choices[0].get("finish_reason"),
        reasoning=replace_surrogates(delta.get("reasoning_content") or delta.get("reasoning") or ""),
        calls=tuple(_call_of(call) for call in delta.get("tool_calls") or ()),
    )


def _call_of(call: Mapping[str, Any]) -> Call:
    function = call.get("function") or {}
    return Call(int(call.get("index") or 0), function.get("name") or "", function.get("arguments") or "")


def _usage_of(usage: Mapping[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    prompt, completion, cached = (
        int(count or 0)
        for count in (
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
            details.get("cached_tokens"),
        )
    )
    return Usage(prompt, completion, cached)
