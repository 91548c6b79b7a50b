"""`growth_of`: the most tokens by which the end of a JSON answer grows where one more value is begun."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

_PATTERN_BYTES: Final = 64
"""Bytes of a string with a short pattern or a format, the shortest of which is not computed."""
_REPEATED: Final = re.compile(r"(?P<group>\))?\{(?P<count>[0-9]{1,5})")


@functools.lru_cache(maxsize=64)
def growth_of(schema: str) -> int:
    """Bound the tokens that a way grows by where one more value is begun: those of the largest shortest document of a
    part of the schema. A token has at least one byte.

    Args:
        schema: JSON text, as `check_schema` writes it.
    """
    root: Any = json.loads(schema)
    known: dict[int, int] = {}
    largest = 0

    def size(node: Any) -> int:
        """Bytes of the shortest document of a schema, or more. Visits all schemas inside it, too."""
        nonlocal largest
        if not isinstance(node, dict):
            return len("null")
        if id(node) in known:
            return known[id(node)]
        known[id(node)] = 0  # on the way around a cycle
        inner = {key: size(node[key]) for key in ("items", "additionalProperties") if key in node}
        fields = {name: size(part) for name, part in node.get("properties", {}).items()}
        others = [size(part) for part in node.get("patternProperties", {}).values()]
        prefix = [size(part) for part in node.get("prefixItems", ())]
        required, least = node.get("required", ()), node.get("minItems", 0)
        other = max([inner.get("additionalProperties", 4), *others])
        container = 4 + sum(prefix) + least * (1 + inner.get("items", 4))
        container += sum(len(json.dumps(name)) + 2 + fields.get(name, other) for name in required)
        container += node.get("minProperties", 0) * (8 + other)
        values = [node["const"]] if "const" in node else node.get("enum", ())
        string = max((len(json.dumps(value)) for value in values), default=2 + node.get("minLength", 0))
        string += _pattern_bytes(node.get("pattern", "")) if "pattern" in node or "format" in node else 0
        total: int = max(container, string, _number_bytes(node))
        if "$ref" in node:
            total += size(root.get("$defs", {}).get(str(node["$ref"]).rpartition("/")[2]))
        total += sum([size(part) for part in node.get("allOf", ())])
        for keyword in ("anyOf", "oneOf"):
            total += max([size(part) for part in node.get(keyword, ())], default=0)
        known[id(node)] = total
        largest = max(largest, total)
        return total

    size(root)
    for definition in root.get("$defs", {}).values() if isinstance(root, dict) else ():
        size(definition)
    return largest


def _number_bytes(node: Mapping[str, Any]) -> int:
    """Bytes of a short number of a schema, or more: as many digits as its bounds and its step have."""
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
    bounds = [node[name] for name in names if isinstance(node.get(name), int | float)]
    return sum(len(format(Decimal(repr(bound)), "f")) for bound in bounds)


def _pattern_bytes(pattern: str) -> int:
    """Bytes of a short string of a pattern, or more in common cases: repetitions are added up."""
    counts = [
        int(match["count"]) * (len(pattern) if match["group"] else 1) for match in _REPEATED.finditer(pattern)
    ]
    return max(_PATTERN_BYTES, len(pattern) + sum(counts))
