"""The engine's errors: who is at fault, and what each audience is told.

A message names the value, the rule and the way out: `prompt has 9000 tokens, the limit is 8192; shorten it or raise
--max-model-len`. The front ends (HTTP, command line, `LLM`) turn these classes into a status, an exit code or an
exception; nobody else catches them.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors the engine raises on purpose."""


class ConfigError(EngineError):
    """The engine cannot start as configured: a bad flag, a broken model folder, too little memory. Exit code 2."""


class RequestError(EngineError):
    """One request is refused; the engine goes on. The client gets `status` and an OpenAI error object.

    Attributes:
        status: HTTP status, 4xx.
        param: the request field at fault, or None where the request as a whole is.
        code: short machine-readable cause, as in OpenAI's error objects (`context_length_exceeded`, ...).
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class EngineDeadError(EngineError):
    """A process of the engine died or stopped answering: 503 for everyone, with the root cause in the message."""


class RankLostError(EngineError):
    """A rank has lost the others of its group: what happened, happened elsewhere, and this message is no cause."""
