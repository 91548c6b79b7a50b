"""`check_schema`: a client's JSON Schema as a schema that can be compiled and means the same, or errors by place."""

from __future__ import annotations

import json
from typing import Any, Final

from ...runtime.config.answer_config import RequestLimits
from .references import check_cycles
from .report import Members, Notes, SchemaError, SchemaReport
from .sample import Sampler
from .unions import Comparer
from .walk import SchemaWalk

MAX_DEPTH: Final = 200
"""Beyond `max_json_depth` too: the library's compiler is recursive."""
MAX_BRANCHES: Final = 64
"""Branches of a `oneOf` that are compared pair by pair."""


def check_schema(
    schema: Any,
    *,
    strict: bool,
    at: str,
    limits: RequestLimits = RequestLimits(),  # noqa: B008  (immutable)
    explain: bool = False,
    closed: bool = False,
) -> SchemaReport:
    """Check a schema. Takes microseconds to milliseconds; it compiles nothing.

    Args:
        schema: plain data, from JSON.
        strict: every keyword is enforced exactly, or refused. If not, the schema to compile may allow more, with
            warnings.
        at: the client's path of the schema, with which messages begin.
        limits: on its size.
        explain: collect the findings of all keywords.
        closed: an object that lists properties, and says nothing of others, has no others.

    Raises:
        SchemaError: (a GrammarError) it is no schema, too large, allows no document, or cannot be enforced.
    """
    _check_size(schema, at, limits)
    notes = Notes(at, strict=strict, explain=explain)
    walk = SchemaWalk(schema, notes, closed=closed)
    root = walk.written()
    comparer = Comparer(walk.definitions)
    for out in tuple(walk.one_ofs):
        if not _has_disjoint_branches(out, comparer) and not _separate(out, comparer, walk):
            reason = "a value may fit two branches, so that it is treated as anyOf"
            notes.approximate(walk.pointers[id(out)], "oneOf", reason)
    for (
        out
    ) in walk.one_ofs:  # after all were compared: `_separate` copies branches that have a `oneOf` themselves
        _make_any_of(out)
    check_cycles(root, walk.definitions, walk.pointers, notes)
    found = Sampler(walk.definitions, walk.pointers).sample(root)
    if found.impossible:
        notes.refuse("unsatisfiable_schema", found.pointer, found.reason)
    if isinstance(root, dict) and walk.definitions:
        root["$defs"] = walk.definitions
    return SchemaReport(
        {} if root is True else root, notes.warnings, notes.findings, found.value, found.known
    )


def parse_schema(text: str, at: str, limits: RequestLimits) -> Any:
    """A schema that the client sends as a string.

    Raises:
        SchemaError: no JSON, or too large.
    """
    _check_bytes(len(text.encode("utf-8", "surrogatepass")), at, limits)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(at, limits) from None
    except ValueError as error:
        raise SchemaError("invalid_schema", at, f"it is not valid JSON: {error}") from None


def _has_disjoint_branches(out: Members, comparer: Comparer) -> bool:
    branches = out["oneOf"]
    return len(branches) <= MAX_BRANCHES and all(
        comparer.are_disjoint(branches[i], branches[j]) for i in range(len(branches)) for j in range(i)
    )


def _separate(out: Members, comparer: Comparer, walk: SchemaWalk) -> bool:
    """Forbid names in the branches of a `oneOf` of objects, so that no value fits two; whether that can be done."""
    branches = out["oneOf"]
    if len(branches) > MAX_BRANCHES:
        return False
    required = frozenset(out.get("required", ()))
    names = comparer.forbidden_names(branches, required, are_objects=out.get("type") == "object")
    if names is None:
        return False
    for index, (branch, forbidden) in enumerate(zip(branches, names, strict=True)):
        target = comparer.target(branch)
        if forbidden and isinstance(target, dict):
            changed = branches[index] = dict(target)
            changed["properties"] = {
                **target.get("properties", {}),
                **dict.fromkeys(sorted(forbidden), False),
            }
            walk.pointers[id(changed)] = walk.pointers[id(target)]
            if "oneOf" in changed:
                walk.one_ofs.append(changed)
    return True


def _make_any_of(out: Members) -> None:
    """Make a `oneOf` an `anyOf`, at its place among the keywords."""
    if "anyOf" in out:
        out["allOf"] = [
            *out.get("allOf", ()),
            {"anyOf": out.pop("oneOf")},
        ]  # a new list: a copy may have the old one
        return
    members = [("anyOf" if key == "oneOf" else key, value) for key, value in out.items()]
    out.clear()
    out.update(members)


def _check_size(schema: Any, at: str, limits: RequestLimits) -> None:
    """Check depth, number of values and bytes; level by level, so that the stack does not grow."""
    level: list[Any] = [schema]
    count = size = 0
    for _ in range(min(limits.max_json_depth, MAX_DEPTH) + 1):
        count += len(level)
        if count > limits.max_json_items:
            text = f"the schema has more than {limits.max_json_items:,} values, which is the limit; send a smaller "
            raise SchemaError("schema_too_complex", at, text + "one, or raise --max-json-items")
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                size += _key_chars(value) + 4 * len(value)
                inner += value.values()
            elif isinstance(value, list | tuple):
                size += 2 + len(value)
                inner += value
            else:
                size += len(value) + 2 if isinstance(value, str) else 4
        _check_bytes(size, at, limits)
        if not inner:
            return
        level = inner
    raise _too_deep(at, limits)


def _key_chars(value: dict[Any, Any]) -> int:
    try:
        return sum(map(len, value))
    except TypeError:  # a key that is no string is refused later
        return sum(len(key) for key in value if isinstance(key, str))


def _check_bytes(size: int, at: str, limits: RequestLimits) -> None:
    most = limits.max_schema_kb << 10
    if size > most:
        text = f"the schema has {size:,} bytes or more, the limit is {most:,}; send a smaller one, or raise "
        raise SchemaError("schema_too_complex", at, text + "--max-schema-kb")


def _too_deep(at: str, limits: RequestLimits) -> SchemaError:
    most = min(limits.max_json_depth, MAX_DEPTH)
    text = f"the schema is nested more than {most} deep, which is the limit; move parts of it under $defs, or raise "
    return SchemaError("schema_too_complex", at, text + "--max-json-depth")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
