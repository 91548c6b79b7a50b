"""`check_cycles`: recursive references at places where the library cannot follow them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from .notes import Notes
from .report import Schema, SchemaError

Members = dict[str, Any]

MAX_CHAIN: Final = 200
"""References that lead from one to the next: the library's compiler follows them by recursion."""
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties")
_SINGLES: Final = ("items", "additionalProperties")


def check_cycles(
    root: Schema, definitions: Mapping[str, Schema], pointers: Mapping[int, str], notes: Notes
) -> None:
    """Check the references of a written schema, and rewrite those that cannot be combined with their siblings.

    Raises:
        SchemaError: a chain of references is too long, or the rewriting would not be exact and must be.
    """
    if not definitions:
        return
    trees: dict[str, Schema] = {"": root, **definitions}
    edges = {name: _targets(tree) for name, tree in trees.items()}
    _check_chains(edges, definitions, pointers, notes)
    cycles = _cycles(edges)
    for name, tree in trees.items():
        for node in _objects(tree):
            for ref in _combined_refs(node):
                if cycles[name] == cycles[ref]:  # this place lies inside of what it refers to
                    notes.approximate(
                        pointers.get(id(node), ""),
                        "$ref" if "$ref" in node else "allOf",
                        "a recursive reference cannot be combined with other keywords",
                        "move the other keywords into the schema that it refers to",
                    )
                    node.clear()
                    node["$ref"] = f"#/$defs/{ref}"
                    break


def subschemas(node: Members) -> Iterator[Schema]:
    """The schemas directly inside a written one."""
    for keyword in _LISTS:
        yield from node.get(keyword, ())
    for keyword in _MAPS:
        yield from node.get(keyword, {}).values()
    for keyword in _SINGLES:
        if keyword in node:
            yield node[keyword]


def target_of(node: Members) -> str | None:
    """The number of the definition that a `$ref` names."""
    ref = node.get("$ref")
    return None if ref is None else str(ref).removeprefix("#/$defs/")


def _objects(tree: Schema) -> Iterator[Members]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending += subschemas(node)


def _targets(tree: Schema) -> list[str]:
    found = (target_of(node) for node in _objects(tree))
    return list(dict.fromkeys(ref for ref in found if ref is not None))


def _cycles(edges: Mapping[str, list[str]]) -> dict[str, int]:
    """A number for each definition; two of them that lead to each other have the same (Kosaraju's algorithm)."""
    ended: list[str] = []
    seen: set[str] = set()
    for start in edges:
        if start in seen:
            continue
        seen.add(start)
        path = [(start, iter(edges[start]))]
        while path:
            _, rest = path[-1]
            ref = next((each for each in rest if each not in seen), None)
            if ref is None:
                ended.append(path.pop()[0])
            else:
                seen.add(ref)
                path.append((ref, iter(edges[ref])))
    users: dict[str, list[str]] = {name: [] for name in edges}
    for name, refs in edges.items():
        for ref in refs:
            users[ref].append(name)
    numbers: dict[str, int] = {}
    for number, start in enumerate(reversed(ended)):
        pending = [start]
        while pending:
            name = pending.pop()
            if name not in numbers:
                numbers[name] = number
                pending += users[name]
    return numbers


def _combined_refs(node: Members) -> Iterator[str]:
    """References that are combined with other keywords of this object."""
    alone = len(node) == 1
    if (ref := target_of(node)) is not None and not alone:
        yield ref
    for branch in node.get("allOf", ()):
        if isinstance(branch, dict) and (ref := target_of(branch)) is not None:
            yield ref
    if not alone:
        for keyword in ("anyOf", "oneOf"):
            for branch in node.get(keyword, ()):
                if isinstance(branch, dict) and (ref := target_of(branch)) is not None:
                    yield ref


def _check_chains(
    edges: Mapping[str, list[str]],
    definitions: Mapping[str, Schema],
    pointers: Mapping[int, str],
    notes: Notes,
) -> None:
    """Depth-first, as the library goes: how deep definitions open inside each other."""
    depth = {"": 0}
    pending: list[tuple[str, Iterator[str]]] = [("", iter(edges[""]))]
    while pending:
        _, rest = pending[-1]
        ref = next((each for each in rest if each not in depth), None)
        if ref is None:
            pending.pop()
            continue
        if len(pending) > MAX_CHAIN:
            raise SchemaError(
                "schema_too_complex",
                notes.path(pointers.get(id(definitions[ref]), "")),
                f"references lead from one to the next more than {MAX_CHAIN} times; put schemas inside each other",
                "$ref",
            )
        depth[ref] = len(pending)
        pending.append((ref, iter(edges[ref])))
