"""`Comparer`: whether no value fits two schemas, or can be made to fit only one, so that `oneOf` is `anyOf`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from .keywords import TYPES
from .references import target_of
from .report import Members, Schema

MAX_DEPTH: Final = 8
MAX_STEPS: Final = 20_000
NAMES_PER_STEP: Final = 16
"""Required names that are compared in the time of a step."""


class _Facts(NamedTuple):
    """Facts about a schema that comparisons need.

    Attributes:
        schema: itself; while it is here, no other object gets its id.
        values: of `const`, or of a short `enum`, comparable; None without.
        kinds: types of its values.
        required: names.
    """

    schema: Members
    values: frozenset[Any] | None
    kinds: frozenset[str]
    required: frozenset[str]


class Comparer:
    """Compares the written schemas of one document; after many steps it knows nothing more."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        """`definitions`: number -> what `$ref` names."""
        self._definitions = definitions
        self._num_steps = 0
        self._facts: dict[int, _Facts] = {}  # by the id of a written schema

    def are_disjoint(self, left: Schema, right: Schema, depth: int = 0) -> bool:
        """Whether no value fits both schemas. False if it is not known.

        Args:
            depth: of the comparison.
        """
        self._num_steps += 1
        if left is False or right is False:
            return True
        if left is True or right is True or depth > MAX_DEPTH or self._num_steps > MAX_STEPS:
            return False
        if self._differ(left, right, depth):
            return True
        depth += 1
        for one, other in ((left, right), (right, left)):
            if (ref := target_of(one)) is not None and self.are_disjoint(
                self._definitions[ref], other, depth
            ):
                return True
            for keyword in ("anyOf", "oneOf"):
                if keyword in one and all(self.are_disjoint(each, other, depth) for each in one[keyword]):
                    return True
            if any(self.are_disjoint(each, other, depth) for each in one.get("allOf", ())):
                return True
        return False

    def forbidden_names(
        self, branches: Sequence[Schema], required: frozenset[str], *, are_objects: bool
    ) -> list[set[str]] | None:
        """The names that each branch of a `oneOf` must forbid, so that no value fits two; None if that is not enough.

        A branch forbids one name that the other one requires. Values that have this name are lost, also those that do
        not fit the other branch for another reason.

        Args:
            branches: the written schemas.
            required: names that all values must have; a branch that forbade one would be lost.
            are_objects: values that are no objects fit none of them.
        """
        names: list[set[str]] = [set() for _ in branches]
        targets = [self.target(branch) for branch in branches]
        for i, left in enumerate(targets):
            for j, right in enumerate(targets[:i]):
                if self.are_disjoint(left, right):
                    continue
                if isinstance(left, bool) or isinstance(right, bool):
                    return None
                one, other = self._facts_of(left), self._facts_of(right)
                if not are_objects and one.kinds & other.kinds != {"object"}:
                    return None
                for index, needs, excluded in ((i, one, other), (j, other, one)):
                    missing = excluded.required - needs.required - required
                    if not missing:
                        return None
                    if not missing & names[index]:
                        own = cast("Members", targets[index]).get("properties", {})
                        names[index].add(min(missing.difference(own) or missing))
        return names

    def target(self, schema: Schema) -> Schema:
        """The schema that a lone reference names; other schemas as they are."""
        if isinstance(schema, dict) and len(schema) == 1 and (ref := target_of(schema)) is not None:
            return self._definitions[ref]
        return schema

    def _differ(self, left: Members, right: Members, depth: int) -> bool:
        """By their own keywords."""
        one, other = self._facts_of(left), self._facts_of(right)
        if one.values is not None and other.values is not None:
            return one.values.isdisjoint(other.values)
        kinds = one.kinds & other.kinds
        if not kinds:
            return True
        if kinds == {"object"}:
            return self._objects_differ(left, right, depth)
        if kinds <= {"integer", "number"}:
            return _above(left, right) or _above(right, left)
        return False

    def _objects_differ(self, left: Members, right: Members, depth: int) -> bool:
        for one, other in ((left, right), (right, left)):
            needed_there = self._facts_of(other).required
            self._num_steps += len(one.get("required", ())) // NAMES_PER_STEP
            for name in one.get("required", ()):
                mine = one.get("properties", {}).get(name, True)
                others = other.get("properties", {})
                closed = other.get("additionalProperties") is False and not other.get("patternProperties")
                if name not in others and closed:
                    return True
                needed = name in needed_there or others.get(name) is False
                if needed and self.are_disjoint(mine, others.get(name, True), depth + 1):
                    return True
        return False

    def _facts_of(self, schema: Members) -> _Facts:
        known = self._facts.get(id(schema))
        if known is None:
            values = _values(schema)
            known = self._facts[id(schema)] = _Facts(
                schema,
                None if values is None else frozenset(map(_comparable, values)),
                frozenset(_kinds(schema, values)),
                frozenset(schema.get("required", ())),
            )
        return known


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


def _comparable(value: Any) -> Hashable:
    """Equal for values that JSON Schema takes as equal: 1 equals 1.0, and true is no number.

    Values are not deeper than `MAX_DEPTH`.
    """
    match value:
        case bool():
            return ("boolean", value)
        case dict():
            return ("object", frozenset((key, _comparable(item)) for key, item in value.items()))
        case list():
            return ("array", *map(_comparable, value))
        case _:
            return cast("Hashable", value)


def type_of(value: Any) -> str:
    """The JSON type; "integer" for a number without a fraction."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
