"""Errors of all routes: one mapping from exceptions to OpenAI's error objects, and the other APIs' forms of them.

`renamed_fields` puts the client's names of fields into errors; `shape_of` finds the form of a path.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, Protocol

import msgspec

from ....runtime.errors import EngineDeadError, QueueFullError, RequestError
from ..framing import error_event, event, line
from .values import shortened

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS: Final = 2000  # messages name fields and paths, which clients choose
_MAX_PARAM_CHARS: Final = 200
_FIRST_NAME: Final = re.compile(r"\w+")
POSITION_HEADER: Final = b"x-engine-queue-position"
_TYPE_OF_STATUS = {401: "authentication_error", 429: "rate_limit_error", 404: "invalid_request_error"}


class MethodNotAllowedError(RequestError):
    """The path exists and the method does not.

    Attributes:
        allowed: methods of the path.
    """

    def __init__(self, message: str, allowed: list[str]) -> None:
        super().__init__(message, code="method_not_allowed", status=405)
        self.allowed = allowed


class ErrorObject(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every unsuccessful response, and the data of an error event in a stream."""

    error: ErrorObject


class ErrorReply(msgspec.Struct):
    """An error ready to send."""

    status: int
    body: ErrorBody
    headers: list[tuple[bytes, bytes]] = []


def reply_to(error: Exception, request_id: str) -> ErrorReply:
    """The response for an exception of a handler. A bug is logged here; the client gets no details of it."""
    match error:
        case RequestError():
            kind = _TYPE_OF_STATUS.get(
                error.status, "server_error" if error.status >= 500 else "invalid_request_error"
            )
            headers: list[tuple[bytes, bytes]] = []
            if error.retry_after_s is not None:
                headers = [(b"retry-after", b"%d" % error.retry_after_s)]
            if isinstance(error, QueueFullError) and error.position is not None:
                headers.append((POSITION_HEADER, b"%d" % error.position))
            if isinstance(error, MethodNotAllowedError):
                headers = [(b"allow", ", ".join(error.allowed).encode())]
            if error.status == 401:
                headers = [(b"www-authenticate", b"Bearer")]
            return _reply(error.status, error.message, kind, error.param, error.code, headers)
        case EngineDeadError():
            return _reply(503, str(error), "server_error", None, "engine_dead", [])
        case _:
            logger.error("bug while handling a request request_id=%s", request_id, exc_info=error)
            message = f"internal error; the server's log has the details under request id {request_id}"
            return _reply(500, message, "server_error", None, "internal_error", [])


OPENAI_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of `SamplingParams` that have another name in OpenAI's API."""


@contextlib.contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors that are raised inside.

    `SamplingParams` and admission use a field's usual name; some requests have it under another one.

    Args:
        names: usual name -> the client's. A name with an underscore is replaced everywhere in the message, another one
            (`n`) only at its beginning, since it may be a word elsewhere.
    """
    try:
        yield
    except RequestError as error:
        error.message = renamed_text(error.message, names)
        error.args = (error.message,)
        if error.param is not None:
            first = _FIRST_NAME.match(error.param)
            usual = first[0] if first else error.param
            error.param = names.get(usual, usual) + error.param[len(usual) :]
        raise


def renamed_text(text: str, names: Mapping[str, str]) -> str:
    """A message with the client's names of fields; `names` as for `renamed_fields`."""
    for usual, client_name in names.items():
        word = rf"(?<![\w.\-]){re.escape(usual)}(?![\w\-])"
        text = re.sub(word if "_" in usual else f"^{word}", client_name.replace("\\", r"\\"), text)
    return text


def _reply(
    status: int,
    message: str,
    kind: str,
    param: str | None,
    code: str | None,
    headers: list[tuple[bytes, bytes]],
) -> ErrorReply:
    if param is not None:
        param = shortened(_printable(param), _MAX_PARAM_CHARS)
    message = shortened(_printable(message), _MAX_MESSAGE_CHARS)
    return ErrorReply(status, ErrorBody(ErrorObject(message, kind, param, code)), headers)


def _printable(text: str) -> str:
    """A value quoted from a request may have half of a surrogate pair, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct):
    """The class of an error, and its text."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Anthropic's error object."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    """Ollama's error object."""

    error: str


class ErrorShape(Protocol):
    """The errors of one API."""

    @property
    def kind(self) -> type[msgspec.Struct]:
        """The type of the body."""
        ...

    def body(self, reply: ErrorReply, request_id: str) -> Any:
        """The body of a response."""
        ...

    def event(self, reply: ErrorReply, request_id: str) -> bytes:
        """The end of a stream that fails, framed."""
        ...


class _OpenAI:
    kind: type[msgspec.Struct] = ErrorBody

    def body(self, reply: ErrorReply, request_id: str) -> Any:
        return reply.body

    def event(self, reply: ErrorReply, request_id: str) -> bytes:
        return error_event(reply.body)


class _Anthropic:
    kind: type[msgspec.Struct] = AnthropicErrorBody

    def body(self, reply: ErrorReply, request_id: str) -> Any:
        usual = "api_error" if reply.status >= 500 else "invalid_request_error"
        error = AnthropicError(_ANTHROPIC_TYPES.get(reply.status, usual), reply.body.error.message)
        return AnthropicErrorBody(error=error, request_id=request_id)

    def event(self, reply: ErrorReply, request_id: str) -> bytes:
        return b"event: error\n" + event(self.body(reply, request_id))


class _Ollama:
    kind: type[msgspec.Struct] = OllamaErrorBody

    def body(self, reply: ErrorReply, request_id: str) -> Any:
        return OllamaErrorBody(reply.body.error.message)

    def event(self, reply: ErrorReply, request_id: str) -> bytes:
        return line(self.body(reply, request_id))


_OPENAI: Final = _OpenAI()
_ANTHROPIC: Final = _Anthropic()
_OLLAMA: Final = _Ollama()


def shape_of(path: str) -> ErrorShape:
    """The errors of a path, whether the path exists or not."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return _ANTHROPIC
    if path.startswith("/api/"):
        return _OLLAMA
    return _OPENAI
