"""Errors as OpenAI's error objects: `{"error": {"message", "type", "param", "code"}}`, one mapping for all routes."""

from __future__ import annotations

import logging

import msgspec

from ...runtime.errors import EngineDeadError, RequestError
from ..admission import QueueFullError

logger = logging.getLogger(__name__)

_TYPE_OF_STATUS = {401: "authentication_error", 429: "rate_limit_error", 404: "invalid_request_error"}


class ErrorObject(msgspec.Struct):
    """What went wrong, for programs and for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success, and the data of an error event in a stream."""

    error: ErrorObject


class ErrorReply(msgspec.Struct):
    """An error ready to send."""

    status: int
    body: ErrorBody
    headers: list[tuple[bytes, bytes]] = []


def reply_to(error: Exception, request_id: str) -> ErrorReply:
    """The answer to a request whose handler raised `error`; a bug is logged here and told without details."""
    match error:
        case RequestError():
            kind = _TYPE_OF_STATUS.get(
                error.status, "server_error" if error.status >= 500 else "invalid_request_error"
            )
            headers = (
                [(b"retry-after", b"%d" % error.retry_after_s)] if isinstance(error, QueueFullError) else []
            )
            if error.status == 401:
                headers = [(b"www-authenticate", b"Bearer")]
            return _reply(error.status, error.message, kind, error.param, error.code, headers)
        case EngineDeadError():
            return _reply(503, str(error), "server_error", None, "engine_dead", [])
        case _:
            logger.error("bug while handling a request request_id=%s", request_id, exc_info=error)
            message = f"internal error; the server's log has the details under request id {request_id}"
            return _reply(500, message, "server_error", None, "internal_error", [])


def _reply(
    status: int,
    message: str,
    kind: str,
    param: str | None,
    code: str | None,
    headers: list[tuple[bytes, bytes]],
) -> ErrorReply:
    # A value quoted in a message may hold half of a surrogate pair, which has no UTF-8 form.
    printable = message.encode("utf-8", "backslashreplace").decode()
    return ErrorReply(status, ErrorBody(ErrorObject(printable, kind, param, code)), headers)
