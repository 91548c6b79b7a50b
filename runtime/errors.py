"""The engine's errors: one class per cause, which decides the HTTP status or the exit code.

A message names the value, the rule and a fix: `prompt has 9000 tokens, the limit is 8192; shorten it or raise
--max-model-len`. Only the front ends (HTTP, command line, `LLM`) catch these classes: they turn them into a status, an
exit code or an exception.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors the engine raises on purpose."""


class ConfigError(EngineError):
    """The engine cannot start as configured: a bad flag, a broken model folder, too little memory. Exit code 2."""


class RequestError(EngineError):
    """One request is refused; the engine keeps running. The client gets `status` and an OpenAI error object.

    Attributes:
        status: HTTP status, 4xx.
        param: the request field with the invalid value, or None if the error is about the request as a whole.
        code: short machine-readable cause, as in OpenAI's error objects (`context_length_exceeded`, ...).
        retry_after_s: when a new attempt makes sense, for the header `Retry-After`; None: it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


class QueueFullError(RequestError):
    """The queue is full: 429 with `Retry-After`, an estimated time until there is room.

    Attributes:
        position: requests ahead of this one; None if the limit is not one on requests.
    """

    retry_after_s: int

    def __init__(self, message: str, retry_after_s: int, position: int | None = None) -> None:
        super().__init__(message, code="queue_full", status=429, retry_after_s=retry_after_s)
        self.position = position


class EngineDeadError(EngineError):
    """A process of the engine died or stopped answering: every request gets 503 with the root cause in the message."""


class ServerError(EngineError):
    """A client command gets no answer from a server, or an error of the server. Exit code 3."""


class RankLostError(EngineError):
    """A rank lost its connection to the group. The root cause is the failure of another rank, not this error."""
