"""Checks of the values of single keywords: numbers, lengths, lists of names, `enum` and `const`."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any, Final, cast

from .report import SchemaError, shown

MAX_EXACT: Final = 2**53
"""The library computes with doubles: larger numbers would be others."""
MAX_COUNT: Final = 2**31 - 1
_MAX_FACTOR: Final = 2**32
_UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")
"""Control characters without a short escape, and halves of surrogate pairs."""


def number(value: Any, keyword: str, at: str) -> int | float:
    """A number, checked.

    Raises:
        SchemaError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SchemaError(
            "invalid_schema", at, f"{keyword} is {shown(value)}, but it must be a number", keyword
        )
    return value


def count(value: Any, keyword: str, at: str) -> int:
    """A number of things, checked; 2.0 is 2.

    Raises:
        SchemaError: it is none.
    """
    if number(value, keyword, at) != int(value) or value < 0:
        raise SchemaError(
            "invalid_schema",
            at,
            f"{keyword} is {shown(value)}, but it must be an integer of at least 0",
            keyword,
        )
    return int(value)


def names(value: Any, keyword: str, at: str) -> list[str]:
    """A list of strings, without repetitions.

    Raises:
        SchemaError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError("invalid_schema", at, f"{keyword} must be a list of strings", keyword)
    return list(dict.fromkeys(value))


def is_factor(value: int | float) -> bool:
    """Whether the library can take a `multipleOf`: it scales by ten until the value is whole."""
    scaled = float(value)
    for _ in range(12):
        if scaled >= _MAX_FACTOR:
            return False
        if scaled.is_integer():
            return True
        scaled *= 10
    return False


def unwritable(value: Any) -> str:
    """Why a value of `enum` or `const` cannot be generated exactly; "" if it can."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str):
            if reason := unwritable_text(item):
                return reason
        elif isinstance(item, int | float) and not isinstance(item, bool):
            exact = abs(item) <= MAX_EXACT if item == int(item) else 1e-6 <= abs(item) < 1e9
            if not exact:
                return f"the number {shown(item)} cannot be generated exactly"
    return ""


def unwritable_text(text: str) -> str:
    """Why a string cannot be generated; "" if it can."""
    found = _UNWRITABLE.search(text)
    if found is None:
        return ""
    if found[0] >= "\ud800":
        return "half of a surrogate pair cannot be generated"
    return f"the control character U+{ord(found[0]):04X} cannot be generated"


def with_whole_numbers(value: Any) -> Any:
    """A value with 2.0 as 2, which is how the library writes it. Values are not deeper than `MAX_DEPTH`."""
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case dict():
            return {key: with_whole_numbers(item) for key, item in value.items()}
        case list():
            return [with_whole_numbers(item) for item in value]
        case _:
            return value


def comparable(value: Any) -> Hashable:
    """Equal for values that JSON Schema takes as equal: 1 equals 1.0, and true is no number.

    Values are not deeper than `MAX_DEPTH`.
    """
    match value:
        case bool():
            return ("boolean", value)
        case dict():
            return ("object", frozenset((key, comparable(item)) for key, item in value.items()))
        case list():
            return ("array", *map(comparable, value))
        case _:
            return cast("Hashable", value)


def type_of(value: Any) -> str:
    """The JSON type; "integer" for a number without a fraction."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
