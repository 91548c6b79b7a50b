"""`HttpBackend`: a server with an OpenAI-compatible API; `attach` finds one of this user on this machine.

A second copy of the weights would take memory and seconds, so `engine chat` attaches, unless a flag, a file or
a variable says how to load a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final

import httpx

from ...launch.child.socket_dir import running_servers
from ...runtime.config.config_sources import DEFAULT_ORIGIN, MergedConfig
from ...runtime.errors import EngineError, RequestError, ServerError
from ...runtime.text import replace_surrogates
from ..port import why_unreachable
from .backend import AnswerChunk, AnswerUsage, Call, why_it_cannot_chat
from .in_process import BASE_SETTINGS
from .session import Message
from .settings import AnswerForm, ChatSettings

_TIMEOUT: Final = httpx.Timeout(10.0, read=None)  # an answer may wait in the server's queue for any time
_QUICK_TIMEOUT_S: Final = 10.0
_START_ONE: Final = "start one with `engine serve`, or leave out --url to run in this process"


class HttpBackend:
    """A backend over `POST /v1/chat/completions`."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        form: AnswerForm = AnswerForm(),  # noqa: B008  (immutable)
    ) -> None:
        """Connect, and find out which model is served.

        Args:
            url: of the server, with or without `/v1`.
            api_key: bearer token.
            model: the name to ask for; None takes the first the server lists.
            form: of the answers.

        Raises:
            RequestError: not a URL, no such model there, or one that generates no text.
            ServerError: no server answers.
        """
        self._base = base_url(url)
        self._form = form
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT)
        self.where = f"at {self._base}"
        entry = self._find_model(model)
        self.model = str(entry["id"])
        if entry.get("task") in ("embed", "score"):
            self._client.close()
            message = why_it_cannot_chat(f"{self.model} {self.where}", entry["task"])
            raise RequestError(message, code="unsupported_task")
        length = entry.get("max_model_len")
        self.max_context = length if isinstance(length, int) else None
        self._counts_tokens = True
        # A usage in each chunk, for answers that are stopped; servers that report their context know the option.
        counted = {} if self.max_context is None else {"continuous_usage_stats": True}
        self._stream_options = {"include_usage": True, **counted}

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        body = {
            **settings.body(),
            **self._form.body(),
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": self._stream_options,
        }
        try:
            with self._client.stream("POST", f"{self._base}/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise error_of(response)
                finished = False
                for event in _events(response):
                    chunk = _chunk_of(event)
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
                if not finished:
                    raise ServerError(f"{self._base}: the stream broke off before the answer was complete")
        except httpx.HTTPError as error:
            raise ServerError(connection_problem(self._base, error, _START_ONE)) from None

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Servers without `/tokenize` are asked once."""
        if not self._counts_tokens:
            return None
        body = {"model": self.model, "messages": list(messages)}
        try:
            response = self._client.post(f"{self._base}/tokenize", json=body, timeout=_QUICK_TIMEOUT_S)
            count = response.json().get("count") if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError, AttributeError):
            count = None
        self._counts_tokens = isinstance(count, int)
        return count if isinstance(count, int) else None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _find_model(self, model: str | None) -> Mapping[str, Any]:
        try:
            response = self._client.get(f"{self._base}/v1/models", timeout=_QUICK_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise ServerError(connection_problem(self._base, error, _START_ONE)) from None
        if response.status_code != httpx.codes.OK:
            raise error_of(response)
        try:
            entries = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self._base}/v1/models does not speak the OpenAI API; check --url") from None
        if not entries:
            raise ServerError(f"{self._base} serves no model")
        if model is not None and model not in entries:
            raise RequestError(
                f"{self._base} has no model {model!r}; it serves {', '.join(entries)}", param="model"
            )
        return entries[model] if model is not None else next(iter(entries.values()))


def base_url(url: str) -> str:
    """`host:port`, `http://host:port` and `http://host:port/v1` all name the same server."""
    if "://" not in url:
        url = f"http://{url}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RequestError(f"--url is {url!r}, which is no URL: {error}", param="url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestError(f"--url is {url!r}, but it must look like http://127.0.0.1:30000", param="url")
    return str(parsed).rstrip("/").removesuffix("/v1")


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
        raise _error_from(event["error"], status=500)
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


def _usage_of(usage: Mapping[str, Any] | None) -> AnswerUsage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return AnswerUsage(
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        int(details.get("cached_tokens") or 0),
    )


def error_of(response: httpx.Response) -> EngineError:
    """The error for a refused request: `RequestError` for 4xx, which the user can fix, else `EngineError`."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = response.text.strip()[:200] or response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        sent = "authorization" in response.request.headers
        problem = "does not know this API key; check" if sent else "wants an API key; pass"
        where = "--api-key or ENGINE_API_KEY" if sent else "--api-key or set ENGINE_API_KEY"
        return RequestError(f"the server {problem} {where}", status=401)
    return _error_from(error, status=response.status_code)


def connection_problem(base: str, error: httpx.HTTPError, hint: str) -> str:
    """The sentence for a request without an answer; see `why_unreachable`."""
    connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    return why_unreachable(base, error, connected=connected, hint=hint)


def _error_from(error: object, *, status: int) -> EngineError:
    fields = error if isinstance(error, Mapping) else {"message": error}
    message, param, code = (
        str(fields[key]) if fields.get(key) else None for key in ("message", "param", "code")
    )
    message = message or f"status {status} without a message"
    if 400 <= status < 500:
        return RequestError(message, param=param, code=code, status=status)
    return ServerError(f"the server failed: {message}")


def asks_for_a_model(merged: MergedConfig) -> bool:
    """Whether a setting of the model is given; a seed is one of the answers, too."""
    own = {name: value.origin for name, value in BASE_SETTINGS.items()}
    return any(
        origin not in (DEFAULT_ORIGIN, own.get(name))
        for name, origin in merged.origins.items()
        if name != "seed"
    )


def attach(api_key: str | None, form: AnswerForm, note: Callable[[str], None]) -> HttpBackend | None:
    """Connect to the newest server of this user on this machine that takes the key.

    Args:
        api_key: bearer token; None: there is none.
        form: of the answers.
        note: called with one line about the server that is taken, and about each that is not.

    Returns:
        None: no server runs, or none takes requests.
    """
    servers = [record for record in reversed(running_servers()) if record.url]
    for record in servers:
        try:
            backend = HttpBackend(record.url, api_key=api_key, form=form)
        except EngineError as error:
            note(f"the server at {record.url} is not used: {error}")
            continue
        others = f", the newest of {len(servers)} servers (--url chooses another one)" if servers[1:] else ""
        note(f"attached to {backend.model} {backend.where}{others}; --no-attach loads a model here")
        return backend
    return None
