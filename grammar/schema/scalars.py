"""Keywords about one value: `type`, `enum`, `const`, and those of strings and numbers."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Final

from ..regex_syntax import RegexError, checked_regex
from .keywords import ANNOTATION_FORMATS, FORMAT_PATTERNS, FORMATS, TYPES
from .notes import Notes
from .report import SchemaError, shown
from .values import MAX_COUNT, MAX_EXACT, count, is_factor, number, unwritable, with_whole_numbers

Members = dict[str, Any]

BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems")


def put_type(value: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`type`: one name or a list of them."""
    kinds = value if isinstance(value, list) else [value]
    for kind in kinds:
        if kind not in TYPES:
            close = get_close_matches(kind, TYPES, n=1) if isinstance(kind, str) else []
            hint = f"; did you mean {close[0]}?" if close else ""
            notes.invalid(
                pointer, f"type is {shown(kind)}, but it must be one of {', '.join(TYPES)}{hint}", "type"
            )
    if not kinds:
        notes.invalid(pointer, "type is an empty list, but it must name a type", "type")
    out["type"] = kinds[0] if len(kinds) == 1 else list(dict.fromkeys(kinds))
    notes.found(pointer, "type")


def put_values(keyword: str, value: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`enum` and `const`."""
    if keyword == "enum":
        if not isinstance(value, list):
            notes.invalid(pointer, f"enum is {shown(value)}, but it must be a list", keyword)
        if not value:
            notes.impossible(pointer, "enum is empty, so that no value fits", keyword)
    if reason := unwritable(value):
        notes.refuse(pointer, keyword, reason, "use another value, or a string")
    out[keyword] = with_whole_numbers(value)
    notes.found(pointer, keyword)


def put_count(keyword: str, value: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`minLength` and its kind."""
    length = count(value, keyword, notes.path(pointer))
    notes.found(pointer, keyword)
    if length > MAX_COUNT:
        if keyword.startswith("max"):
            return  # no answer is that long
        raise SchemaError(
            "schema_too_complex",
            notes.path(pointer),
            f"{keyword} is {length}, more than any answer has",
            keyword,
        )
    out[keyword] = length


def put_bound(keyword: str, value: Any, out: Members, node: Members, pointer: str, notes: Notes) -> None:
    """`minimum` and its kind; draft 4's `exclusiveMinimum: true` becomes a number."""
    if isinstance(value, bool) and keyword.startswith("exclusive"):
        plain = "minimum" if keyword == "exclusiveMinimum" else "maximum"
        if not value or plain not in node:
            return
        value = node[plain]
    bound = number(value, keyword, notes.path(pointer))
    if abs(bound) > MAX_EXACT or 0 < abs(bound) < 1e-9:
        notes.approximate(
            pointer,
            keyword,
            f"{shown(bound)} is beyond 2^53 or too fine",
            "use a bound between -2^53 and 2^53",
        )
        return
    out[keyword] = bound
    notes.found(pointer, keyword)


def put_factor(value: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`multipleOf`."""
    factor = number(value, "multipleOf", notes.path(pointer))
    if factor <= 0:
        notes.invalid(pointer, f"multipleOf is {shown(factor)}, but it must be above 0", "multipleOf")
    if not is_factor(factor):
        notes.approximate(
            pointer,
            "multipleOf",
            f"{shown(factor)} has too many digits",
            "use a number with at most 9 digits",
        )
        return
    out["multipleOf"] = factor
    notes.found(pointer, "multipleOf")


def put_pattern(value: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`pattern`."""
    pattern = library_pattern(value, "pattern", pointer, notes)
    if pattern is not None:
        _add_pattern(pattern, out)
        notes.found(pointer, "pattern")


def library_pattern(value: Any, keyword: str, pointer: str, notes: Notes) -> str | None:
    """A regular expression in the library's dialect; None if it is not enforced.

    Raises:
        SchemaError: it is none, or strictness demands that it is enforced.
    """
    if not isinstance(value, str):
        notes.invalid(pointer, f"{keyword} is {shown(value)}, but it must be a string", keyword)
    try:
        return checked_regex(value, whole=False)
    except RegexError as error:
        if not error.unsupported:
            raise SchemaError(
                "invalid_regex", notes.path(pointer), f"{keyword} {shown(value)}: {error}", keyword
            ) from None
        notes.approximate(pointer, keyword, f"in {shown(value)}, {error}")
        return None


def put_format(value: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`format`."""
    if not isinstance(value, str):
        notes.invalid(pointer, f"format is {shown(value)}, but it must be a string", "format")
    kinds = out.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]) or value in ANNOTATION_FORMATS:
        notes.found(pointer, "format", reason="it does not restrict these values")
    elif value in FORMATS:
        out["format"] = value
        if value in FORMAT_PATTERNS:
            _add_pattern(FORMAT_PATTERNS[value], out)
        notes.found(pointer, "format")
    else:
        notes.approximate(pointer, "format", f"{shown(value)} is not one of {', '.join(sorted(FORMATS))}")


def _add_pattern(pattern: str, out: Members) -> None:
    if "pattern" in out:
        out.setdefault("allOf", []).append({"pattern": pattern})
    else:
        out["pattern"] = pattern


def check_ranges(out: Members, pointer: str, notes: Notes) -> None:
    """Refuse bounds that contradict each other."""
    if len(out) < 2:
        return
    for low, high in (
        ("minLength", "maxLength"),
        ("minItems", "maxItems"),
        ("minProperties", "maxProperties"),
    ):
        if low in out and high in out and out[low] > out[high]:
            notes.impossible(pointer, f"{low} {out[low]} is above {high} {out[high]}", low)
    for low in ("minimum", "exclusiveMinimum"):
        for high in ("maximum", "exclusiveMaximum"):
            if low in out and high in out:
                if out[low] > out[high]:
                    notes.impossible(
                        pointer, f"{low} {shown(out[low])} is above {high} {shown(out[high])}", low
                    )
                if out[low] == out[high] and (low, high) != ("minimum", "maximum"):
                    notes.impossible(
                        pointer, f"no number lies between {low} and {high} {shown(out[high])}", low
                    )
