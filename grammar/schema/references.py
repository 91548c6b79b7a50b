"""`References`: `$ref`s of a schema, resolved inside it; `check_cycles`: those that the library cannot follow."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from .report import Members, Notes, Schema, SchemaError, pointer_to

MAX_CHAIN: Final = 200
"""References that lead from one to the next: the library's compiler follows them by recursion."""
_NOT_SCHEMAS: Final = frozenset({"enum", "const", "default", "examples", "example"})
"""Keywords with plain values: what looks like a schema inside them is none."""

_Steps = tuple["_Steps", str | int] | None
"""A place: the place of what holds it, and one step. The pointers of all places would take space by their lengths."""


class References:
    """The places of one schema that `$ref` can name. Anchors are looked for when the first one is needed."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._id = root.get("$id", root.get("id")) if isinstance(root, dict) else None

    @functools.cached_property
    def has_any(self) -> bool:
        """A `$ref` stands somewhere."""
        return any(isinstance(node.get("$ref"), str) for node, _ in _client_objects(self._root))

    @functools.cached_property
    def _anchors(self) -> dict[str, tuple[Any, _Steps]]:
        found: dict[str, tuple[Any, _Steps]] = {}
        for node, steps in _client_objects(self._root):
            for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                name = node.get(keyword)
                if isinstance(name, str) and (keyword.endswith("nchor") or name.startswith("#")):
                    found.setdefault(name.lstrip("#"), (node, steps))
        return found

    def resolve(self, ref: object, at: str) -> tuple[Any, str]:
        """The schema that a reference names, and its pointer.

        Args:
            ref: the value of `$ref`.
            at: the place that errors name.

        Raises:
            SchemaError: it is no reference, leads out of the schema, or to nothing.
        """
        if not isinstance(ref, str):
            raise SchemaError("invalid_schema", at, "$ref must be a string", "$ref")
        base, _, fragment = ref.partition("#")
        if base and base != str(self._id or "").rstrip("#"):
            text = f'$ref is "{ref[:200]}", but references must stay inside the schema; put the schema under $defs, '
            raise SchemaError("invalid_schema", at, text + "and refer to #/$defs/NAME", "$ref")
        fragment = unquote(fragment)
        if not fragment:
            return self._root, ""
        if not fragment.startswith("/"):
            if fragment in self._anchors:
                node, steps = self._anchors[fragment]
                return node, _pointer(steps)
            raise self._dangling(ref, at)
        node, pointer = self._root, ""
        for raw in fragment[1:].split("/"):
            step = raw.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and step in node:
                node = node[step]
            elif isinstance(node, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(node):
                node = node[int(step[:9])]
            else:
                raise self._dangling(ref, at)
            pointer = pointer_to(pointer, step)
        return node, pointer

    def _dangling(self, ref: str, at: str) -> SchemaError:
        names = [
            f"#/{keyword}/{name}"
            for keyword in ("$defs", "definitions")
            if isinstance(self._root, dict) and isinstance(self._root.get(keyword), dict)
            for name in self._root[keyword]
        ]
        known = f"; there are {', '.join(names[:5])}" if names else ""
        text = f'$ref is "{ref[:200]}", which is not in the schema{known}'
        return SchemaError("invalid_schema", at, text, "$ref")


def _client_objects(root: Any) -> Iterator[tuple[dict[str, Any], _Steps]]:
    """All objects that may be schemas, with the steps to them; not by recursion."""
    pending: list[tuple[Any, _Steps]] = [(root, None)]
    while pending:
        node, steps = pending.pop()
        if isinstance(node, dict):
            yield node, steps
            pending += ((value, (steps, key)) for key, value in node.items() if key not in _NOT_SCHEMAS)
        elif isinstance(node, list):
            pending += ((value, (steps, i)) for i, value in enumerate(node))


def _pointer(steps: _Steps) -> str:
    found: list[str | int] = []
    while steps is not None:
        steps, step = steps
        found.append(step)
    return pointer_to("", *reversed(found))


# ------------------------------------------------------------ cycles


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
    ended, too_deep = _depth_first(edges)
    if too_deep is not None:
        text = (
            f"references lead from one to the next more than {MAX_CHAIN} times; put schemas inside each other"
        )
        notes.refuse("schema_too_complex", pointers.get(id(definitions[too_deep]), ""), text, "$ref")
    cycles = _cycles(edges, ended)
    for name, tree in trees.items():
        for node in _written_objects(tree):
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


def _written_objects(tree: Schema) -> Iterator[Members]:
    """The objects of a written schema, without those of its definitions."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
                pending += node.get(keyword, ())
            for keyword in ("properties", "patternProperties"):
                pending += node.get(keyword, {}).values()
            pending += (node[keyword] for keyword in ("items", "additionalProperties") if keyword in node)


def target_of(node: Members) -> str | None:
    """The number of the definition that a `$ref` names."""
    ref = node.get("$ref")
    return None if ref is None else str(ref).removeprefix("#/$defs/")


def _targets(tree: Schema) -> list[str]:
    found = (target_of(node) for node in _written_objects(tree))
    return list(dict.fromkeys(ref for ref in found if ref is not None))


def _combined_refs(node: Members) -> Iterator[str]:
    """References that are combined with other keywords of this object."""
    is_alone = len(node) == 1
    if (ref := target_of(node)) is not None and not is_alone:
        yield ref
    for keyword in ("allOf",) if is_alone else ("allOf", "anyOf", "oneOf"):
        for branch in node.get(keyword, ()):
            if isinstance(branch, dict) and (ref := target_of(branch)) is not None:
                yield ref


def _depth_first(edges: Mapping[str, list[str]]) -> tuple[list[str], str | None]:
    """The definitions in the order in which a search from the root leaves them, all of which it reaches.

    The second value is a definition that opens inside more than `MAX_CHAIN` others, as the library goes.
    """
    ended: list[str] = []
    seen = {""}
    path = [("", iter(edges[""]))]
    while path:
        ref = next((each for each in path[-1][1] if each not in seen), None)
        if ref is None:
            ended.append(path.pop()[0])
        elif len(path) > MAX_CHAIN:
            return ended, ref
        else:
            seen.add(ref)
            path.append((ref, iter(edges[ref])))
    return ended, None


def _cycles(edges: Mapping[str, list[str]], ended: list[str]) -> dict[str, int]:
    """A number for each definition; two of them that lead to each other have the same (Kosaraju's algorithm)."""
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
