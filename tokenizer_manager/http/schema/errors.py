"""Errors as OpenAI's error objects: `{"error": {"message", "type", "param", "code"}}`, one mapping for all routes.

`renamed_fields` puts the client's names of fields into errors.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from ....runtime.errors import EngineDeadError, RequestError
from ...admission.queue_limiter import QueueFullError
from .json_body import shortened

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
        for usual, client_name in names.items():
            word = rf"(?<![\w.\-]){re.escape(usual)}(?![\w\-])"
            pattern = word if "_" in usual else f"^{word}"
            error.message = re.sub(pattern, client_name.replace("\\", r"\\"), error.message)
        error.args = (error.message,)
        if error.param is not None:
            first = _FIRST_NAME.match(error.param)
            usual = first[0] if first else error.param
            error.param = names.get(usual, usual) + error.param[len(usual) :]
        raise


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
