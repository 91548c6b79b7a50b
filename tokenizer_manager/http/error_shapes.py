"""`shape_of`: errors in the form of the API that a path belongs to."""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

import msgspec

from .delivery import error_event, event
from .ndjson import line
from .schema.errors import ErrorBody, ErrorReply

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
