"""`Check`: one line of `engine doctor`: the subject of a check, its verdict, and the fix."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Verdict(enum.StrEnum):
    """The effect of a check on serving."""

    OK = "ok"
    WARN = "warn"  # it will serve, but less well
    FAIL = "fail"  # it will not serve
    SKIP = "skip"  # not checked, because another check failed


class Check(NamedTuple):
    """See the module.

    Attributes:
        code: id of the check, a word that does not change between versions.
        text: what was found.
        fix: what to do about it; "" if nothing is wrong.
        details: the numbers of the text, for `--json`.
    """

    code: str
    verdict: Verdict
    text: str
    fix: str = ""
    details: Mapping[str, Any] = {}

    @property
    def is_well(self) -> bool:
        """Whether nothing needs a fix."""
        return self.verdict in (Verdict.OK, Verdict.SKIP)


def ok(code: str, text: str, **details: Any) -> Check:
    """Nothing is wrong."""
    return Check(code, Verdict.OK, text, details=details)


def warn(code: str, text: str, fix: str) -> Check:
    """It will serve, but less well."""
    return Check(code, Verdict.WARN, text, fix)


def fail(code: str, text: str, fix: str) -> Check:
    """It will not serve."""
    return Check(code, Verdict.FAIL, text, fix)


def skip(code: str, why: str) -> Check:
    """It was not checked."""
    return Check(code, Verdict.SKIP, f"not checked: {why}")


def refused(code: str, message: str) -> Check:
    """A failure from the message of a `ConfigError`, which has the fix after its last semicolon."""
    text, _, fix = message.rpartition("; ")
    return fail(code, text or message, fix if text else "see the message")


def will_serve(checks: Iterable[Check]) -> bool:
    """Whether no check failed."""
    return all(check.verdict is not Verdict.FAIL for check in checks)
