"""Result of the check of a schema: `SchemaReport`, `SchemaError`, and the `Notes` that it takes at each `Place`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, NoReturn

from ..backend import GrammarError
from .keywords import KEYWORDS, Fate

Schema = dict[str, Any] | bool
Members = dict[str, Any]
MAX_VALUE_CHARS: Final = 60
"""Longest value that a message quotes."""
MAX_HINTS: Final = 20
"""Hints for misspelled keywords at most; a hint takes 0.1 ms."""


class Finding(NamedTuple):
    """Treatment of one keyword at one place.

    Attributes:
        pointer: JSON pointer of the object that has the keyword; "" for the whole schema.
        reason: "" where there is nothing to say.
        rewrite: the smallest change that makes it enforceable; "" for none.
    """

    pointer: str
    keyword: str
    fate: Fate
    reason: str = ""
    rewrite: str = ""


@dataclass(slots=True)
class SchemaReport:
    """A schema that can be used.

    Attributes:
        schema: what to compile: only keywords that are enforced, references under `$defs`.
        warnings: for the response.
        findings: of every keyword, if they were asked for.
        sample: a short document of the schema, as a Python value; meaningful if `has_sample`.
    """

    schema: Schema
    warnings: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sample: Any = None
    has_sample: bool = False

    @property
    def text(self) -> str:
        """The schema to compile, as JSON."""
        return json.dumps(self.schema, ensure_ascii=False, separators=(",", ":"))

    @property
    def compact_sample(self) -> str | None:
        """The sample as JSON without whitespace; None if none is known."""
        if not self.has_sample:
            return None
        return json.dumps(self.sample, ensure_ascii=False, separators=(",", ":"))


class SchemaError(GrammarError):
    """A schema is refused.

    Attributes:
        at: the place, as a path of the request and a JSON pointer.
        keyword: the cause; "" for the schema at that place as a whole.
    """

    def __init__(self, code: str, at: str, text: str, keyword: str = "") -> None:
        super().__init__(f"{at}: {text}" if at else text, code, at)
        self.keyword = keyword


def pointer_to(pointer: str, *steps: str | int) -> str:
    """A JSON pointer, some steps further."""
    for step in steps:
        text = str(step)
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{text}"
    return pointer


def shown(value: object) -> str:
    """A value of a schema for a message, short."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**MAX_VALUE_CHARS:
        return f"an integer of more than {MAX_VALUE_CHARS} digits"
    text = json.dumps(value[: MAX_VALUE_CHARS + 1] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"


class Notes:
    """Collects findings and warnings, and raises errors, with the client's path.

    Attributes:
        warnings: for the response; one for each place and keyword.
        findings: of every keyword; empty without `explain`.
    """

    def __init__(self, at: str, *, strict: bool, explain: bool) -> None:
        self.at = at
        self._strict = strict
        self._explain = explain
        self._seen: set[tuple[str, str]] = set()
        self.warnings: list[str] = []
        self.findings: list[Finding] = []

    def found(
        self, pointer: str, keyword: str, fate: Fate | None = None, reason: str = "", rewrite: str = ""
    ) -> None:
        """Note what becomes of a keyword: `fate`, or what the table says."""
        if self._explain and (pointer, keyword) not in self._seen:
            self._seen.add((pointer, keyword))
            if fate is None:
                fate = KEYWORDS[keyword].fate if keyword in KEYWORDS else Fate.ANNOTATION
            self.findings.append(Finding(pointer, keyword, fate, reason, rewrite))

    def approximate(self, pointer: str, keyword: str, reason: str = "", rewrite: str = "") -> None:
        """Note that a keyword is not enforced exactly, with the reason and the rewrite of the table or other ones.

        Raises:
            SchemaError: it must be, by `strict`.
        """
        rule = KEYWORDS[keyword]
        reason, rewrite = reason or rule.reason, rewrite or rule.rewrite
        if self._strict:
            text = f"{keyword} cannot be enforced here ({reason}); {rewrite or 'leave it out'}, or send strict: false "
            self.refuse("unsupported_schema", pointer, text + "and check it yourself", keyword)
        self._warn(pointer, keyword, f"{keyword} is not enforced ({reason})" + (rewrite and f"; {rewrite}"))
        self.found(pointer, keyword, Fate.APPROXIMATED, reason, rewrite)

    def unknown(self, pointer: str, keyword: str) -> None:
        """Note a keyword that the table does not have.

        Raises:
            SchemaError: by `strict`.
        """
        if keyword.startswith("x-"):
            self.found(pointer, keyword)
            return
        has_hint = len(self.warnings) < MAX_HINTS
        close = get_close_matches(keyword[:40], KEYWORDS, n=1, cutoff=0.8) if has_hint else []
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        reason = "no keyword of JSON Schema that is known"
        if self._strict:
            self.refuse("unsupported_schema", pointer, f"{shown(keyword)} is {reason}; {hint}", keyword)
        self._warn(pointer, keyword, f"{shown(keyword)} has no effect: it is {reason}; {hint}")
        self.found(pointer, keyword, Fate.ANNOTATION, f"it is {reason}", hint)

    def warn(self, pointer: str, keyword: str, text: str) -> None:
        """Warn about a keyword that is enforced otherwise than the client may expect; with `strict` too."""
        self._warn(pointer, keyword, text)
        self.found(pointer, keyword, reason=text)

    def refuse(self, code: str, pointer: str, text: str, keyword: str = "") -> NoReturn:
        """Raise the `SchemaError` of this code."""
        raise SchemaError(code, self.at + pointer, text, keyword)

    def _warn(self, pointer: str, keyword: str, text: str) -> None:
        if (pointer, "!" + keyword) not in self._seen:
            self._seen.add((pointer, "!" + keyword))
            self.warnings.append(f"{self.at}{pointer}: {text}")


@dataclass(slots=True, eq=False)
class Place:
    """A schema inside the client's, and the notes about it; methods are those of `Notes`.

    Attributes:
        node: as the client wrote it.
        pointer: to it.
        out: the schema to compile.
        branch: it is a branch of an allOf, or of an anyOf or oneOf that has other keywords beside it.
        add: has the schema at a pointer checked; returns what becomes of it.
    """

    node: Members
    pointer: str
    out: Members
    branch: bool
    notes: Notes
    add: Callable[[Any, str, bool], Schema]

    def child(self, value: Any, *steps: str | int, branch: bool = False) -> Schema:
        """Have a schema checked that is some steps inside of this one; returns what becomes of it."""
        return self.add(value, pointer_to(self.pointer, *steps), branch)

    def found(self, keyword: str, fate: Fate | None = None, reason: str = "") -> None:
        """Note what becomes of a keyword."""
        self.notes.found(self.pointer, keyword, fate, reason)

    def approximate(self, keyword: str, reason: str = "", rewrite: str = "") -> None:
        """Note that a keyword is not enforced exactly, or refuse it."""
        self.notes.approximate(self.pointer, keyword, reason, rewrite)

    def unsupported(self, keyword: str, reason: str, rewrite: str = "") -> NoReturn:
        """Refuse a keyword whatever `strict` says."""
        text = f"{keyword} is not supported here: {reason}" + (rewrite and f"; {rewrite}")
        self.notes.refuse("unsupported_schema", self.pointer, text, keyword)

    def invalid(self, text: str, keyword: str = "") -> NoReturn:
        """The schema is none."""
        self.notes.refuse("invalid_schema", self.pointer, text, keyword)

    def impossible(self, text: str, keyword: str = "") -> NoReturn:
        """No document fits."""
        self.notes.refuse("unsatisfiable_schema", self.pointer, text, keyword)
