"""`are_disjoint`: whether no value fits two schemas, so that `oneOf` is `anyOf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .keywords import TYPES
from .report import Schema
from .values import json_equal, type_of

Members = dict[str, Any]
Definitions = Mapping[str, Schema]

_MAX_DEPTH: Final = 8


def are_disjoint(left: Schema, right: Schema, definitions: Definitions, depth: int = 0) -> bool:
    """Whether no value fits both written schemas. False if it is not known.

    Args:
        definitions: what `$ref` names.
        depth: of the comparison.
    """
    if left is False or right is False:
        return True
    if left is True or right is True or depth > _MAX_DEPTH:
        return False
    for one, other in ((left, right), (right, left)):
        if (target := _target(one, definitions)) is not None and are_disjoint(
            target, other, definitions, depth + 1
        ):
            return True
        for keyword in ("anyOf", "oneOf"):
            if keyword in one and all(
                are_disjoint(each, other, definitions, depth + 1) for each in one[keyword]
            ):
                return True
        if any(are_disjoint(each, other, definitions, depth + 1) for each in one.get("allOf", ())):
            return True
    return _differ(left, right, definitions, depth)


def _differ(left: Members, right: Members, definitions: Definitions, depth: int) -> bool:
    """By their own keywords."""
    values = _values(left), _values(right)
    if values[0] is not None and values[1] is not None:
        return not any(json_equal(one, other) for one in values[0] for other in values[1])
    kinds = _kinds(left, values[0]) & _kinds(right, values[1])
    if not kinds:
        return True
    if kinds == {"object"}:
        return _objects_differ(left, right, definitions, depth)
    if kinds <= {"integer", "number"}:
        return _above(left, right) or _above(right, left)
    return False


def _objects_differ(left: Members, right: Members, definitions: Definitions, depth: int) -> bool:
    for one, other in ((left, right), (right, left)):
        for name in one.get("required", ()):
            mine = one.get("properties", {}).get(name, True)
            others = other.get("properties", {})
            if (
                name not in others
                and other.get("additionalProperties") is False
                and not other.get("patternProperties")
            ):
                return True
            if (name in other.get("required", ()) or others.get(name) is False) and are_disjoint(
                mine, others.get(name, True), definitions, depth + 1
            ):
                return True
    return False


def _above(one: Members, other: Members) -> bool:
    """Whether all numbers of `one` are above those of `other`."""
    for low in ("minimum", "exclusiveMinimum"):
        for high in ("maximum", "exclusiveMaximum"):
            if low in one and high in other:
                exclusive = low != "minimum" or high != "maximum"
                if one[low] > other[high] or (exclusive and one[low] == other[high]):
                    return True
    return False


def _values(schema: Members) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= 200 else None


def _kinds(schema: Members, values: list[Any] | None) -> set[str]:
    kinds = schema.get("type", TYPES)
    named = {kinds} if isinstance(kinds, str) else set(kinds)
    if "number" in named:
        named.add("integer")
    return named & {type_of(value) for value in values} if values is not None else named


def _target(schema: Members, definitions: Definitions) -> Schema | None:
    ref = schema.get("$ref")
    return None if ref is None else definitions[ref.removeprefix("#/$defs/")]
