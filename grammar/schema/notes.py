"""`Notes`: what the check of a schema says about its keywords, by `strict`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Final, NoReturn

from .keywords import KEYWORDS, Fate
from .report import Finding, SchemaError, shown

_MAX_HINTS: Final = 20


class Notes:
    """Collects findings and warnings, and raises errors, with the client's path.

    Attributes:
        warnings: for the response; one for each place and keyword.
        findings: of every keyword; empty without `explain`.
    """

    def __init__(self, at: str, *, strict: bool, explain: bool) -> None:
        self._at = at
        self._strict = strict
        self._explain = explain
        self._seen: set[tuple[str, str]] = set()
        self.warnings: list[str] = []
        self.findings: list[Finding] = []

    def path(self, pointer: str) -> str:
        """A place as the client knows it."""
        return self._at + pointer

    def found(self, pointer: str, keyword: str, fate: Fate | None = None, reason: str = "") -> None:
        """Note what becomes of a keyword: `fate`, or what the table says."""
        if self._explain and (pointer, keyword) not in self._seen:
            self._seen.add((pointer, keyword))
            usual = KEYWORDS.get(keyword)
            if fate is None:
                fate = usual.fate if usual is not None else Fate.ANNOTATION
            rewrite = usual.rewrite if usual is not None and fate is Fate.APPROXIMATED else ""
            self.findings.append(Finding(pointer, keyword, fate, reason, rewrite))

    def approximate(self, pointer: str, keyword: str, reason: str = "", rewrite: str = "") -> None:
        """A keyword is not enforced exactly.

        Args:
            reason: instead of the table's.
            rewrite: instead of the table's.

        Raises:
            SchemaError: it must be, by `strict`.
        """
        rule = KEYWORDS.get(keyword)
        reason = reason or (rule.reason if rule is not None else "")
        rewrite = rewrite or (rule.rewrite if rule is not None else "")
        if self._strict:
            ways = f"{rewrite}, or" if rewrite else "leave it out, or"
            raise SchemaError(
                "unsupported_schema",
                self.path(pointer),
                f"{keyword} cannot be enforced here ({reason}); {ways} send strict: false and check it yourself",
                keyword,
            )
        self._warn(
            pointer, keyword, f"{keyword} is not enforced ({reason})" + (f"; {rewrite}" if rewrite else "")
        )
        if self._explain and (pointer, keyword) not in self._seen:
            self._seen.add((pointer, keyword))
            self.findings.append(Finding(pointer, keyword, Fate.APPROXIMATED, reason, rewrite))

    def unknown(self, pointer: str, keyword: str, value: Any) -> None:
        """A keyword that the table does not have.

        Raises:
            SchemaError: by `strict`.
        """
        if keyword.startswith("x-"):
            self.found(pointer, keyword)
            return
        few = len(self.warnings) < _MAX_HINTS  # a hint takes 0.1 ms
        close = get_close_matches(keyword[:40], KEYWORDS, n=1, cutoff=0.8) if few else []
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        if self._strict:
            raise SchemaError(
                "unsupported_schema",
                self.path(pointer),
                f"{shown(keyword)} is no keyword of JSON Schema that is known; {hint}",
                keyword,
            )
        reason = "it is no keyword of JSON Schema that is known"
        self._warn(pointer, keyword, f"{shown(keyword)} has no effect: {reason}; {hint}")
        if self._explain:
            self.findings.append(Finding(pointer, keyword, Fate.ANNOTATION, reason, hint))

    def warn(self, pointer: str, keyword: str, text: str) -> None:
        """Warn about a keyword that is enforced otherwise than the client may expect; with `strict` too."""
        self._warn(pointer, keyword, text)
        self.found(pointer, keyword, reason=text)

    def invalid(self, pointer: str, text: str, keyword: str = "") -> NoReturn:
        """The schema is none.

        Raises:
            SchemaError: always.
        """
        raise SchemaError("invalid_schema", self.path(pointer), text, keyword)

    def impossible(self, pointer: str, text: str, keyword: str = "") -> NoReturn:
        """No document fits.

        Raises:
            SchemaError: always.
        """
        raise SchemaError("unsatisfiable_schema", self.path(pointer), text, keyword)

    def refuse(self, pointer: str, keyword: str, reason: str, rewrite: str = "") -> NoReturn:
        """A keyword is not supported, whatever `strict` says.

        Raises:
            SchemaError: always.
        """
        text = f"{keyword} is not supported here: {reason}" + (f"; {rewrite}" if rewrite else "")
        raise SchemaError("unsupported_schema", self.path(pointer), text, keyword)

    def _warn(self, pointer: str, keyword: str, text: str) -> None:
        if (pointer, "!" + keyword) not in self._seen:
            self._seen.add((pointer, "!" + keyword))
            self.warnings.append(f"{self.path(pointer)}: {text}")
