"""The check of the largest schemas: its time grows with their size and no faster, and it keeps little.

Measured is CPU time of this thread, at the limits of a server: a check whose time grows with the square takes several
seconds for most of these.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.schema.check import check_schema

LONGEST_S = 1.0
MOST_BYTES = 192 << 20
INTEGER = {"type": "integer"}


def whole(_: int) -> dict[str, Any]:
    return INTEGER


def members(count: int, inner: Callable[[int], Any] = whole, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": inner(i) for i in range(count)}, **more}


def names(count: int) -> list[str]:
    return [f"k{i}" for i in range(count)]


def layers(i: int) -> dict[str, Any]:
    """References to three of the definitions 15 to 17 places further, and from the last ones to the first."""
    targets = [i + 15 + j if i + 15 + j < 2900 else 0 for j in range(3)]
    return {"allOf": [{"$ref": f"#/$defs/d{target}"} for target in targets]}


def chained(i: int) -> dict[str, Any]:
    """Needs the definition before it, in chains of 190."""
    inner = {"$ref": f"#/$defs/d{i - 1}"} if i % 190 else INTEGER
    return {"type": "object", "required": ["a"], "properties": {"a": inner}}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "properties": lambda: members(16_000),
    "required properties": lambda: members(12_000, required=names(12_000)),
    "a number of properties": lambda: members(12_000, required=names(12_000), minProperties=12_001),
    "listed names": lambda: {
        "type": "object",
        "propertyNames": {"enum": names(40_000)},
        "required": names(20_000),
    },
    "lone branches of anyOf": lambda: members(10_000, lambda i: {"anyOf": [INTEGER]}),
    "lone branches of oneOf": lambda: members(10_000, lambda i: {"oneOf": [INTEGER]}),
    "oneOf with values": lambda: members(
        20, lambda i: {"oneOf": [{"enum": [f"{j}_{k}" for k in range(20)]} for j in range(64)]}
    ),
    "oneOf with required names": lambda: {"oneOf": [{"type": "object", "required": names(800)}] * 64},
    "cycles": lambda: {"$defs": {f"d{i}": layers(i) for i in range(2900)}, "$ref": "#/$defs/d0"},
    "chains of references": lambda: {
        "$defs": {f"d{i}": chained(i) for i in range(4000)},
        "anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(4000)],
    },
    "patterns of names": lambda: members(
        60, lambda i: {"patternProperties": {f"^p{j:03d}_": INTEGER for j in range(200)}}
    ),
    "misspelled keywords": lambda: members(12_000, lambda i: {"typ": "integer"}),
    "misspelled keywords in a long path": lambda: {
        "properties": {"n" * 4000: members(12_000, lambda i: {"typ": "integer"})}
    },
    "a very long path": lambda: {"properties": {"n" * 200_000: members(8000)}},
    "anchors in a very long path": lambda: {
        "$defs": {"n" * 200_000: members(8000, lambda i: {"$anchor": f"a{i}"})},
        "$ref": "#a5",
    },
}


def check(name: str) -> str:
    """Check one of them; the code of its refusal, or ""."""
    try:
        check_schema(SCHEMAS[name](), strict=False, at="schema")
    except GrammarError as error:
        return error.code
    return ""


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_time_grows_with_the_size(name: str):
    begin_s = time.thread_time()

    assert check(name) in ("", "schema_too_complex", "unsatisfiable_schema")

    assert time.thread_time() - begin_s < LONGEST_S


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in SCHEMAS if "path" in name])
def test_paths_take_little_memory(name: str):
    tracemalloc.start()
    try:
        check(name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < MOST_BYTES


@pytest.mark.parametrize("place", ["properties", "$defs"])
def test_a_path_that_is_too_long_is_refused_by_name(place: str):
    inner = {"a": {"type": "integer"}}
    schema = {place: {"n" * 5000: {"properties": inner}}, "$ref": f"#/{place}/{'n' * 5000}/properties/a"}

    with pytest.raises(GrammarError, match="more than 4,096 characters") as caught:
        check_schema(schema, strict=False, at="schema")

    assert caught.value.code == "schema_too_complex"
    assert len(caught.value.message) < 500
