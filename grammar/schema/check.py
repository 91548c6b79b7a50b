"""`check_schema`: a client's JSON Schema as a schema that can be compiled and means the same, or errors by place."""

from __future__ import annotations

from typing import Any, Final

from ...runtime.config.request_limits import RequestLimits
from .cycles import check_cycles
from .notes import Notes
from .report import Schema, SchemaReport
from .sample import Sampler
from .size import check_size
from .unions import Comparer
from .walk import SchemaWalk

_MAX_BRANCHES: Final = 64
"""Branches of a `oneOf` that are compared pair by pair."""


def check_schema(
    schema: Any,
    *,
    strict: bool,
    at: str,
    limits: RequestLimits = RequestLimits(),  # noqa: B008  (immutable)
    explain: bool = False,
) -> SchemaReport:
    """Check a schema. Takes microseconds to milliseconds; it compiles nothing.

    Args:
        schema: plain data, from JSON.
        strict: every keyword is enforced exactly, or refused. If not, the schema to compile may allow more, with
            warnings.
        at: the client's path of the schema, with which messages begin.
        limits: on its size.
        explain: collect the findings of all keywords.

    Raises:
        SchemaError: (a GrammarError) it is no schema, too large, allows no document, or cannot be enforced.
    """
    check_size(schema, at, limits)
    notes = Notes(at, strict=strict, explain=explain)
    walk = SchemaWalk(schema, notes)
    root = walk.written()
    _settle_one_ofs(walk, notes)
    check_cycles(root, walk.definitions, walk.pointers, notes)
    sampler = Sampler(walk.definitions, walk.pointers)
    found = sampler.sample(root)
    if found.impossible:
        notes.impossible(found.pointer, found.reason)
    if isinstance(root, dict) and walk.definitions:
        root["$defs"] = walk.definitions
    return SchemaReport(_compiled(root), notes.warnings, notes.findings, found.value, found.known)


def _compiled(root: Schema) -> Schema:
    return {} if root is True else root


def _settle_one_ofs(walk: SchemaWalk, notes: Notes) -> None:
    """Make each `oneOf` an `anyOf`, which it is if no value fits two branches."""
    comparer = Comparer(walk.definitions)
    for out in walk.one_ofs:
        branches = out["oneOf"]
        if len(branches) > _MAX_BRANCHES or not all(
            comparer.are_disjoint(branches[i], branches[j]) for i in range(len(branches)) for j in range(i)
        ):
            notes.approximate(
                walk.pointers[id(out)],
                "oneOf",
                "a value may fit two branches, so that it is treated as anyOf",
            )
        if "anyOf" in out:
            out.setdefault("allOf", []).append({"anyOf": branches})
        else:
            members = [("anyOf" if key == "oneOf" else key, value) for key, value in out.items()]
            out.clear()
            out.update(members)
            continue
        del out["oneOf"]
