"""Keywords about the members of objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from .keywords import KEYWORDS, Fate
from .notes import Notes
from .report import Schema, pointer_to, shown
from .scalars import Members, library_pattern
from .values import count, names, unwritable_text

Child = Callable[[Any, str], Schema]
"""Has the schema at a place checked; returns what becomes of it."""

_LITERAL_START: Final = re.compile(r"\^((?:[A-Za-z0-9_ ]|\\[-./])+)(?![*?{+|])")
_MAX_PATTERNS: Final = 200
"""Patterns of an object that are compared pair by pair."""
_APPLICATORS: Final = (
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "not",
    "$dynamicRef",
)


def put_properties(value: Any, out: Members, pointer: str, notes: Notes, child: Child) -> None:
    """`properties`."""
    if not isinstance(value, dict):
        notes.invalid(pointer, f"properties is {shown(value)}, but it must be an object", "properties")
    _check_names(list(value), "properties", pointer, notes)
    out["properties"] = {
        name: child(inner, pointer_to(pointer, "properties", name)) for name, inner in value.items()
    }
    notes.found(pointer, "properties")


def put_required(value: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`required`; draft 3's `true` inside a property is named."""
    if isinstance(value, bool):
        notes.invalid(
            pointer,
            "required is true or false, but it must be a list of names, beside properties",
            "required",
        )
    required = names(value, "required", notes.path(pointer))
    _check_names(required, "required", pointer, notes)
    out["required"] = required
    notes.found(pointer, "required")


def put_other_properties(node: Members, out: Members, pointer: str, notes: Notes, child: Child) -> None:
    """`additionalProperties`, `patternProperties` and `unevaluatedProperties`, which belong together."""
    patterns = _patterns(node, pointer, notes, child)
    if patterns is None:  # not enforced, and then the other properties are not either
        return
    if patterns:
        out["patternProperties"] = patterns
        notes.found(pointer, "patternProperties")
    if "additionalProperties" in node:
        out["additionalProperties"] = child(
            node["additionalProperties"], pointer_to(pointer, "additionalProperties")
        )
        notes.found(pointer, "additionalProperties")
    if "unevaluatedProperties" in node:
        _put_unevaluated("unevaluatedProperties", "additionalProperties", node, out, pointer, notes, child)


def put_unevaluated_items(node: Members, out: Members, pointer: str, notes: Notes, child: Child) -> None:
    """`unevaluatedItems`."""
    if "unevaluatedItems" in node:
        _put_unevaluated("unevaluatedItems", "items", node, out, pointer, notes, child)


def _put_unevaluated(
    keyword: str, usual: str, node: Members, out: Members, pointer: str, notes: Notes, child: Child
) -> None:
    if node[keyword] in (True, {}) or (usual in out and not any(name in node for name in _APPLICATORS)):
        notes.found(pointer, keyword, Fate.ENFORCED)
    elif any(name in node for name in (*_APPLICATORS, "contains")):
        child(node[keyword], pointer_to(pointer, keyword))
        notes.approximate(
            pointer, keyword, "the properties or items of other parts of the schema are not known to it"
        )
    else:
        out[usual] = child(node[keyword], pointer_to(pointer, keyword))
        notes.found(pointer, keyword)


def put_names(rule: Any, out: Members, pointer: str, notes: Notes) -> None:
    """`propertyNames`, of which a pattern or a list of names can be enforced.

    Args:
        rule: the schema of the names, with references resolved.
        out: with the other keywords about properties.
    """
    restricting = {
        key: value
        for key, value in (rule.items() if isinstance(rule, dict) else ())
        if (key, value) != ("type", "string")
        and (key not in KEYWORDS or KEYWORDS[key].fate is not Fate.ANNOTATION)
    }
    if rule is True or (isinstance(rule, dict) and not restricting):
        notes.found(pointer, "propertyNames", Fate.ENFORCED)
        return
    if rule is False:
        out.pop("patternProperties", None)
        out["properties"] = dict.fromkeys(out.get("properties", ()), False)
        out["additionalProperties"] = False
        notes.found(pointer, "propertyNames", Fate.ENFORCED)
        return
    values = restricting.get("enum", [restricting["const"]] if "const" in restricting else None)
    free = not out.get("properties") and not out.get("patternProperties")
    others = out.get("additionalProperties", True)
    if free and len(restricting) == 1 and "pattern" in restricting:
        pattern = library_pattern(restricting["pattern"], "propertyNames", pointer, notes)
        if pattern is None:
            return
        out["patternProperties"] = {pattern: others}
    elif free and len(restricting) == 1 and isinstance(values, list):
        allowed = [name for name in values if isinstance(name, str)]
        _check_names(allowed, "propertyNames", pointer, notes)
        out["properties"] = dict.fromkeys(allowed, others)
    else:
        notes.approximate(pointer, "propertyNames")
        return
    out["additionalProperties"] = False
    notes.found(pointer, "propertyNames", Fate.ENFORCED)


def put_counts(node: Members, out: Members, pointer: str, notes: Notes, *, combined: bool) -> None:
    """`minProperties` and `maxProperties`.

    Args:
        combined: the object is combined with other schemas, so that its properties are not known here.
    """
    path = notes.path(pointer)
    required, listed = set(out.get("required", ())), out.get("properties", {})
    closed = out.get("additionalProperties") is False and "patternProperties" not in out
    fixed = required.issuperset(listed) and not combined
    if "minProperties" in node:
        least = count(node["minProperties"], "minProperties", path)
        if least > len(required):
            if closed and not combined and least > len(required.union(listed)):
                notes.impossible(
                    pointer, f"minProperties is {least}, but there are fewer properties", "minProperties"
                )
            if fixed:
                out["minProperties"] = least
            if not fixed or least > len(required) + 1:
                notes.approximate(pointer, "minProperties", "a generated name may repeat" if fixed else "")
        notes.found(pointer, "minProperties")
    if "maxProperties" in node:
        most = min(count(node["maxProperties"], "maxProperties", path), out.get("maxProperties", 2**31))
        if most < len(required):
            notes.impossible(
                pointer,
                f"maxProperties is {most}, but {len(required)} properties are required",
                "maxProperties",
            )
        if not closed or most < len(listed):
            if fixed:
                out["maxProperties"] = most
            else:
                notes.approximate(pointer, "maxProperties")
        notes.found(pointer, "maxProperties")


def _patterns(node: Members, pointer: str, notes: Notes, child: Child) -> Members | None:
    """`patternProperties` for the library; None if they are not enforced."""
    value = node.get("patternProperties", {})
    if not isinstance(value, dict):
        notes.invalid(
            pointer, f"patternProperties is {shown(value)}, but it must be an object", "patternProperties"
        )
    patterns: Members = {}
    for pattern, inner in value.items():
        made = child(inner, pointer_to(pointer, "patternProperties", pattern))
        checked = library_pattern(pattern, "patternProperties", pointer, notes)
        if checked is None:
            return None
        patterns[checked] = made
    if len(patterns) > 1 and not (len(patterns) <= _MAX_PATTERNS and _start_differently(list(patterns))):
        notes.approximate(pointer, "patternProperties", "two of the patterns may match one name")
        return None
    return patterns


def _start_differently(patterns: list[str]) -> bool:
    starts = [found[1] if (found := _LITERAL_START.match(pattern)) else "" for pattern in patterns]
    if any("|" in pattern for pattern in patterns):
        return False
    return not any(
        one.startswith(other) or other.startswith(one)
        for i, one in enumerate(starts)
        for other in starts[i + 1 :]
    )


def _check_names(all_names: list[Any], keyword: str, pointer: str, notes: Notes) -> None:
    for name in all_names:
        if not isinstance(name, str):
            notes.invalid(pointer, f"{keyword} has the name {shown(name)}, but it must be a string", keyword)
        if reason := unwritable_text(name):
            notes.refuse(pointer, keyword, reason)
