"""`References`: `$ref`s of a schema, resolved inside it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from .report import SchemaError, pointer_to

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
        return any(isinstance(node.get("$ref"), str) for node, _ in _objects(self._root))

    @functools.cached_property
    def _anchors(self) -> dict[str, tuple[Any, _Steps]]:
        found: dict[str, tuple[Any, _Steps]] = {}
        for node, steps in _objects(self._root):
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
            raise SchemaError(
                "invalid_schema",
                at,
                f'$ref is "{ref[:200]}", but references must stay inside the schema; put the schema under $defs, and '
                f"refer to #/$defs/NAME",
                "$ref",
            )
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
        return SchemaError(
            "invalid_schema", at, f'$ref is "{ref[:200]}", which is not in the schema{known}', "$ref"
        )


def _objects(root: Any) -> Iterator[tuple[dict[str, Any], _Steps]]:
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
