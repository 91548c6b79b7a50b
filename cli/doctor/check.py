"""`Check`: one line of `engine doctor`: what was looked at, the verdict, and the one thing to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class CheckStatus(enum.StrEnum):
    """What a line means for serving."""

    OK = "ok"
    WARN = "warn"  # it will serve, but less well
    FAIL = "fail"  # it will not serve
    SKIP = "skip"  # could not be looked at, because of what another line says


class Check(NamedTuple):
    """See the module.

    Attributes:
        code: which check, one word that stays the same.
        text: what was found.
        fix: what to do about it; "" where all is well.
        details: the numbers behind the text, for `--json`.
    """

    code: str
    verdict: CheckStatus
    text: str
    fix: str = ""
    details: Mapping[str, Any] = {}

    @property
    def is_well(self) -> bool:
        """Whether there is nothing to do about it."""
        return self.verdict in (CheckStatus.OK, CheckStatus.SKIP)


def ok(code: str, text: str, **details: Any) -> Check:
    """All is well."""
    return Check(code, CheckStatus.OK, text, details=details)


def warn(code: str, text: str, fix: str) -> Check:
    """It will serve, but less well."""
    return Check(code, CheckStatus.WARN, text, fix)


def fail(code: str, text: str, fix: str) -> Check:
    """It will not serve."""
    return Check(code, CheckStatus.FAIL, text, fix)


def skip(code: str, why: str) -> Check:
    """It could not be looked at."""
    return Check(code, CheckStatus.SKIP, f"not checked: {why}")


def refused(code: str, message: str) -> Check:
    """A failure from the message of a `ConfigError`, which ends with the way out behind its last semicolon."""
    text, _, fix = message.rpartition("; ")
    return fail(code, text or message, fix if text else "see the message")


def will_serve(checks: Iterable[Check]) -> bool:
    """Whether none of them stands against it."""
    return all(check.verdict is not CheckStatus.FAIL for check in checks)
