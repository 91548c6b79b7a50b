"""One function per keyword, or group of keywords: writes it into the schema to compile, or notes why it cannot.

`SchemaWalk` calls them for each `Place`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Final

from ..regex_syntax import RegexError, checked_regex
from .keywords import ANNOTATION_FORMATS, FORMAT_MAX_CHARS, FORMAT_PATTERNS, FORMATS, KEYWORDS, TYPES, Fate
from .report import Members, Place, shown

MAX_EXACT: Final = 2**53
"""The library computes with doubles: larger numbers would be others."""
MAX_COUNT: Final = 2**31 - 1
MAX_FACTOR: Final = 2**32
MAX_PATTERNS: Final = 200
"""Patterns of an object that are compared pair by pair."""
_UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")
"""Control characters without a short escape, and halves of surrogate pairs."""
OTHER_PROPERTIES: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_NOT_FINITE: Final = (math.inf, -math.inf)
_ITEMS: Final = ("items", "prefixItems", "additionalItems")
_LITERAL_START: Final = re.compile(r"\^((?:[A-Za-z0-9_ ]|\\[-./])+)(?![*?{+|])")
_APPLICATORS: Final = (
    *("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "not", "$dynamicRef"),
)


# ------------------------------------------------------------ any value


def put_type(place: Place) -> None:
    """`type`: one name or a list of them."""
    value = place.node["type"]
    kinds = value if isinstance(value, list) else [value]
    for kind in kinds:
        if kind not in TYPES:
            close = get_close_matches(kind, TYPES, n=1) if isinstance(kind, str) else []
            hint = f"; did you mean {close[0]}?" if close else ""
            place.invalid(f"type is {shown(kind)}, but it must be one of {', '.join(TYPES)}{hint}", "type")
    if not kinds:
        place.invalid("type is an empty list, but it must name a type", "type")
    place.out["type"] = kinds[0] if len(kinds) == 1 else list(dict.fromkeys(kinds))
    place.found("type")


def _put_values(keyword: str, value: Any, place: Place) -> None:
    """`enum` and `const`."""
    if keyword == "enum":
        if not isinstance(value, list):
            place.invalid(f"enum is {shown(value)}, but it must be a list", keyword)
        if not value:
            place.impossible("enum is empty, so that no value fits", keyword)
    if reason := _why_unwritable(value):
        place.unsupported(keyword, reason, "use another value, or a string")
    place.out[keyword] = _with_whole_numbers(value)
    place.found(keyword)


def _why_unwritable(value: Any) -> str:
    """Reason why a value cannot be generated exactly; "" if it can."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str):
            if found := _UNWRITABLE.search(item):
                if found[0] >= "\ud800":
                    return "half of a surrogate pair cannot be generated"
                return f"the control character U+{ord(found[0]):04X} cannot be generated"
        elif isinstance(item, int | float) and not isinstance(item, bool) and not _is_exact(item):
            return f"the number {shown(item)} cannot be generated exactly"
    return ""


def _is_exact(value: int | float) -> bool:
    if isinstance(value, int) or value.is_integer():
        return abs(value) <= MAX_EXACT
    return 1e-6 <= abs(value) < 1e9


def _with_whole_numbers(value: Any) -> Any:
    """A value with 2.0 as 2, which is how the library writes it. Values are not deeper than `MAX_DEPTH`."""
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case dict():
            return {key: _with_whole_numbers(item) for key, item in value.items()}
        case list():
            return [_with_whole_numbers(item) for item in value]
        case _:
            return value


# ------------------------------------------------------------ numbers and counts


def count(value: Any, keyword: str, place: Place) -> int:
    """A number of things, checked; 2.0 is 2."""
    if _number(value, keyword, place) != int(value) or value < 0:
        place.invalid(f"{keyword} is {shown(value)}, but it must be an integer of at least 0", keyword)
    return int(value)


def _number(value: Any, keyword: str, place: Place) -> int | float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value in _NOT_FINITE
        or value != value
    ):
        place.invalid(f"{keyword} is {shown(value)}, but it must be a number", keyword)
    return value


def _put_count(keyword: str, value: Any, place: Place) -> None:
    """`minLength` and its kind."""
    length = count(value, keyword, place)
    place.found(keyword)
    if keyword == "maxLength":  # a format may have one, too
        length = min(length, place.out.get(keyword, length))
    if length <= MAX_COUNT:
        place.out[keyword] = length
    elif keyword.startswith("min"):
        text = f"{keyword} is {shown(length)}, more than any answer has"
        place.notes.refuse("schema_too_complex", place.pointer, text, keyword)


def _put_bound(keyword: str, value: Any, place: Place) -> None:
    """`minimum` and its kind; draft 4's `exclusiveMinimum: true` becomes a number."""
    if isinstance(value, bool) and keyword.startswith("exclusive"):
        plain = keyword.removeprefix("exclusive").lower()
        if not value or plain not in place.node:
            return
        value = place.node[plain]
    bound = _number(value, keyword, place)
    if abs(bound) > MAX_EXACT or 0 < abs(bound) < 1e-9:
        reason = f"{shown(bound)} is beyond 2^53 or too fine"
        place.approximate(keyword, reason, "use a bound between -2^53 and 2^53")
        return
    place.out[keyword] = bound
    place.found(keyword)


def _put_factor(keyword: str, value: Any, place: Place) -> None:
    """`multipleOf`."""
    factor = _number(value, keyword, place)
    if factor <= 0:
        place.invalid(f"multipleOf is {shown(factor)}, but it must be above 0", keyword)
    if not _is_factor(factor):
        reason = f"{shown(factor)} has too many digits"
        place.approximate(keyword, reason, "use a number with at most 9 digits")
        return
    place.out["multipleOf"] = factor
    place.found(keyword)


def _is_factor(value: int | float) -> bool:
    """Whether the library can take a `multipleOf`: it scales by ten until the value is whole."""
    if value >= MAX_FACTOR:
        return False
    scaled = float(value)
    for _ in range(12):
        if scaled >= MAX_FACTOR or scaled.is_integer():
            return scaled < MAX_FACTOR
        scaled *= 10
    return False


def check_ranges(place: Place) -> None:
    """Refuse bounds that contradict each other."""
    out = place.out
    for kind in ("Length", "Items", "Properties"):
        low, high = f"min{kind}", f"max{kind}"
        if low in out and high in out and out[low] > out[high]:
            place.impossible(f"{low} {out[low]} is above {high} {out[high]}", low)
    for low in ("minimum", "exclusiveMinimum"):
        for high in ("maximum", "exclusiveMaximum"):
            if low not in out or high not in out:
                continue
            if out[low] > out[high]:
                place.impossible(f"{low} {shown(out[low])} is above {high} {shown(out[high])}", low)
            if out[low] == out[high] and (low, high) != ("minimum", "maximum"):
                place.impossible(f"no number lies between {low} and {high} {shown(out[high])}", low)


# ------------------------------------------------------------ strings


def _put_pattern(keyword: str, value: Any, place: Place) -> None:
    """`pattern`."""
    pattern = _library_pattern(value, keyword, place)
    if pattern is not None:
        _add_pattern(pattern, place.out)
        place.found(keyword)


def _put_format(keyword: str, value: Any, place: Place) -> None:
    """`format`."""
    if not isinstance(value, str):
        place.invalid(f"format is {shown(value)}, but it must be a string", keyword)
    kinds = place.out.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]) or value in ANNOTATION_FORMATS:
        place.found(keyword, reason="it does not restrict these values")
    elif value in FORMATS:
        place.out["format"] = value
        if value in FORMAT_PATTERNS:
            _add_pattern(FORMAT_PATTERNS[value], place.out)
        if value in FORMAT_MAX_CHARS:
            most = FORMAT_MAX_CHARS[value]
            place.out["maxLength"] = min(most, place.out.get("maxLength", most))
        place.found(keyword)
    else:
        place.approximate(keyword, f"{shown(value)} is not one of {', '.join(sorted(FORMATS))}")


def _library_pattern(value: Any, keyword: str, place: Place) -> str | None:
    """A regular expression in the library's dialect; None if it is not enforced."""
    if not isinstance(value, str):
        place.invalid(f"{keyword} is {shown(value)}, but it must be a string", keyword)
    try:
        return checked_regex(value, whole=False)
    except RegexError as error:
        if not error.unsupported:
            place.notes.refuse("invalid_regex", place.pointer, f"{keyword} {shown(value)}: {error}", keyword)
        place.approximate(keyword, f"in {shown(value)}, {error}")
        return None


def _add_pattern(pattern: str, out: Members) -> None:
    if "pattern" in out:
        out.setdefault("allOf", []).append({"pattern": pattern})
    else:
        out["pattern"] = pattern


# ------------------------------------------------------------ arrays


def _put_items(keyword: str, value: Any, place: Place) -> None:
    """`items`, `prefixItems` and `additionalItems` of all drafts."""
    if keyword != next(name for name in place.node if name in _ITEMS):
        return
    items = place.node.get("items")
    keyword, rest = ("items", "additionalItems") if isinstance(items, list) else ("prefixItems", "items")
    first = place.node.get(keyword, [])
    if not isinstance(first, list):
        place.invalid(f"{keyword} is {shown(first)}, but it must be a list", keyword)
    if first:
        place.out["prefixItems"] = [place.child(inner, keyword, i) for i, inner in enumerate(first)]
    if rest in place.node:
        place.out["items"] = place.child(place.node[rest], rest)
    for name in _ITEMS:
        if name in place.node:
            place.found(name)


def put_unevaluated(keyword: str, usual: str, place: Place) -> None:
    """`unevaluatedItems` and `unevaluatedProperties`; `usual`: the keyword that it is the same as."""
    value = place.node[keyword]
    is_applied = any(name in place.node for name in _APPLICATORS)
    if value in (True, {}) or (usual in place.out and not is_applied):
        place.found(keyword, Fate.ENFORCED)
    elif is_applied or "contains" in place.node:
        place.child(value, keyword)
        place.approximate(keyword, "the properties or items of other parts of the schema are not known to it")
    else:
        place.out[usual] = place.child(value, keyword)
        place.found(keyword)


# ------------------------------------------------------------ objects


def _put_properties(keyword: str, value: Any, place: Place) -> None:
    """`properties`."""
    if not isinstance(value, dict):
        place.invalid(f"properties is {shown(value)}, but it must be an object", keyword)
    _check_names(list(value), keyword, place)
    place.out["properties"] = {name: place.child(inner, keyword, name) for name, inner in value.items()}
    place.found(keyword)


def _put_required(keyword: str, value: Any, place: Place) -> None:
    """`required`; draft 3's `true` inside a property is named."""
    if isinstance(value, bool):
        text = "required is true or false, but it must be a list of names, beside properties"
        place.invalid(text, keyword)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        place.invalid("required must be a list of strings", keyword)
    required = list(dict.fromkeys(value))
    _check_names(required, keyword, place)
    place.out["required"] = required
    place.found(keyword)


def _put_other_properties(keyword: str, value: Any, place: Place) -> None:
    """`additionalProperties`, `patternProperties` and `unevaluatedProperties`, which belong together."""
    if keyword != next(name for name in place.node if name in OTHER_PROPERTIES):
        return
    patterns = _patterns(place)
    if patterns is None:  # not enforced, and then the other properties are not either
        return
    if patterns:
        place.out["patternProperties"] = patterns
        place.found("patternProperties")
    if "additionalProperties" in place.node:
        value = place.node["additionalProperties"]
        place.out["additionalProperties"] = place.child(value, "additionalProperties")
        place.found("additionalProperties")
    if "unevaluatedProperties" in place.node:
        put_unevaluated("unevaluatedProperties", "additionalProperties", place)


def put_names(rule: Any, place: Place) -> None:
    """`propertyNames`, of which a pattern or a list of names can be enforced.

    Args:
        rule: the schema of the names, with references resolved.
        place: the other keywords about properties are written already.
    """
    out = place.out
    restricting = {
        key: value
        for key, value in (rule.items() if isinstance(rule, dict) else ())
        if (key, value) != ("type", "string")
        and (key not in KEYWORDS or KEYWORDS[key].fate is not Fate.ANNOTATION)
    }
    values = restricting.get("enum", [restricting["const"]] if "const" in restricting else None)
    is_free = not out.get("properties") and not out.get("patternProperties") and len(restricting) == 1
    others = out.get("additionalProperties", True)
    if rule is True or (isinstance(rule, dict) and not restricting):
        place.found("propertyNames", Fate.ENFORCED)
        return
    if rule is False:
        out.pop("patternProperties", None)
        out["properties"] = dict.fromkeys(out.get("properties", ()), False)
    elif is_free and "pattern" in restricting:
        pattern = _library_pattern(restricting["pattern"], "propertyNames", place)
        if pattern is None:
            return
        out["patternProperties"] = {pattern: others}
    elif is_free and isinstance(values, list):
        allowed = [name for name in values if isinstance(name, str)]
        _check_names(allowed, "propertyNames", place)
        out["properties"] = dict.fromkeys(allowed, others)
    else:
        place.approximate("propertyNames")
        return
    out["additionalProperties"] = False
    place.found("propertyNames", Fate.ENFORCED)


def put_property_counts(place: Place) -> None:
    """`minProperties` and `maxProperties`."""
    node, out = place.node, place.out
    is_combined = place.branch or any(name in out for name in ("$ref", "allOf", "anyOf", "oneOf"))
    required, listed = set(out.get("required", ())), out.get("properties", {})
    is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
    is_fixed = required.issuperset(listed) and not is_combined
    if "minProperties" in node:
        least = min(count(node["minProperties"], "minProperties", place), MAX_COUNT)
        if least > len(required):
            if is_closed and not is_combined and least > len(required.union(listed)):
                text = f"minProperties is {shown(least)}, but there are fewer properties"
                place.impossible(text, "minProperties")
            if is_fixed:
                out["minProperties"] = least
            if not is_fixed or least > len(required) + 1:
                place.approximate("minProperties", "a generated name may repeat" if is_fixed else "")
        place.found("minProperties")
    if "maxProperties" in node:
        most = min(count(node["maxProperties"], "maxProperties", place), out.get("maxProperties", 2**31))
        if most < len(required):
            text = f"maxProperties is {most}, but {len(required)} properties are required"
            place.impossible(text, "maxProperties")
        if not is_closed or most < len(listed):
            if is_fixed:
                out["maxProperties"] = most
            else:
                place.approximate("maxProperties")
        place.found("maxProperties")


def _patterns(place: Place) -> Members | None:
    """`patternProperties` for the library; None if they are not enforced."""
    value = place.node.get("patternProperties", {})
    if not isinstance(value, dict):
        place.invalid(f"patternProperties is {shown(value)}, but it must be an object", "patternProperties")
    patterns: Members = {}
    for pattern, inner in value.items():
        made = place.child(inner, "patternProperties", pattern)
        checked = _library_pattern(pattern, "patternProperties", place)
        if checked is None:
            return None
        patterns[checked] = made
    if len(patterns) > 1 and not (len(patterns) <= MAX_PATTERNS and _start_differently(list(patterns))):
        place.approximate("patternProperties", "two of the patterns may match one name")
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


def _check_names(all_names: list[Any], keyword: str, place: Place) -> None:
    for name in all_names:
        if not isinstance(name, str):
            place.invalid(f"{keyword} has the name {shown(name)}, but it must be a string", keyword)
        if reason := _why_unwritable(name):
            place.unsupported(keyword, reason)


RULES: Final[dict[str, Callable[[str, Any, Place], None]]] = {
    **dict.fromkeys(("enum", "const"), _put_values),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _put_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _put_bound),
    "multipleOf": _put_factor,
    "pattern": _put_pattern,
    "format": _put_format,
    **dict.fromkeys(_ITEMS, _put_items),
    "properties": _put_properties,
    "required": _put_required,
    **dict.fromkeys(OTHER_PROPERTIES, _put_other_properties),
}
"""The functions for keywords that are written in the order of the client's schema: of a group, at its first keyword."""
