"""`SchemaWalk`: goes over a schema, place by place, and writes the schema to compile.

The written schema has only keywords that are enforced, in one form each: `prefixItems` and `items` for all drafts,
numbers for exclusive bounds, and every `$ref` as `#/$defs/<number>`. Its order is the client's: it is the order of
properties in answers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from .keywords import FAMILIES, FORMATS, KEYWORDS, Fate
from .notes import Notes
from .objects import (
    put_counts,
    put_names,
    put_other_properties,
    put_properties,
    put_required,
    put_unevaluated_items,
)
from .references import References
from .report import Schema, SchemaError, pointer_to, shown
from .scalars import (
    BOUNDS,
    COUNTS,
    Members,
    check_ranges,
    put_bound,
    put_count,
    put_factor,
    put_format,
    put_pattern,
    put_type,
    put_values,
)
from .values import count

MAX_POINTER_CHARS: Final = 4096
"""Of the path to a place. The pointers of all places are kept, and each has the names of the objects around it."""
_COMBINING = ("allOf", "anyOf", "oneOf")
_TYPED = ("type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef")


class _Place(NamedTuple):
    """A schema that is still to be written.

    Attributes:
        out: where it is written to.
        branch: it is a branch of an allOf, or of an anyOf or oneOf that has other keywords beside it.
    """

    node: Members
    pointer: str
    out: Members
    branch: bool


class SchemaWalk:
    """One walk.

    Attributes:
        definitions: number -> written schema that a `$ref` names.
        pointers: id of a written object -> its place.
        one_ofs: written objects with `oneOf`.
    """

    def __init__(self, root: Any, notes: Notes) -> None:
        self._root = root
        self._notes = notes
        self._references = References(root)
        self._pending: list[_Place] = []
        self._numbers: dict[str, str] = {}  # pointer of a target -> its number
        self.definitions: dict[str, Schema] = {}
        self.pointers: dict[int, str] = {}
        self.one_ofs: list[Members] = []

    def written(self) -> Schema:
        """The schema to compile, without `$defs`.

        Raises:
            SchemaError: it is no schema, or it is refused.
        """
        out = self._child(self._root, "")
        while self._pending:
            self._write(self._pending.pop())
        return out

    def _child(self, node: Any, pointer: str, *, branch: bool = False, out: Members | None = None) -> Schema:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            self._notes.invalid(
                pointer, f"the schema is {shown(node)}, but a schema is an object, or true or false"
            )
        if len(pointer) > MAX_POINTER_CHARS:
            raise SchemaError(
                "schema_too_complex",
                self._notes.path(pointer[:200] + "…"),
                f"the path to this place has more than {MAX_POINTER_CHARS:,} characters, which is the limit; use "
                f"shorter names",
            )
        out = {} if out is None else out
        self.pointers[id(out)] = pointer
        self._pending.append(_Place(node, pointer, out, branch))
        return out

    def _write(self, place: _Place) -> None:
        node, pointer, out, _ = place
        if "type" in node:  # first, since others depend on it
            put_type(node["type"], out, pointer, self._notes)
        else:
            self._put_implied_type(place)
        for keyword, value in node.items():
            if not isinstance(keyword, str):
                self._notes.invalid(pointer, f"the key {keyword!r} is no string")
            self._put(keyword, value, place)
        if "propertyNames" in node:
            self._put_names(node["propertyNames"], place)
        if "minProperties" in node or "maxProperties" in node:
            combined = place.branch or any(name in out for name in ("$ref", *_COMBINING))
            put_counts(node, out, pointer, self._notes, combined=combined)
        put_unevaluated_items(node, out, pointer, self._notes, self._child)
        check_ranges(out, pointer, self._notes)
        self._unwrap(out)

    def _put(self, keyword: str, value: Any, place: _Place) -> None:
        node, pointer, out, _ = place
        notes = self._notes
        match keyword:
            case "type" | "propertyNames" | "minProperties" | "maxProperties" | "unevaluatedItems":
                pass  # before or after the others
            case "enum" | "const":
                put_values(keyword, value, out, pointer, notes)
            case "allOf" | "anyOf" | "oneOf":
                self._put_branches(keyword, value, place)
            case "$ref":
                self._put_ref(value, place)
            case "properties":
                put_properties(value, out, pointer, notes, self._child)
            case "required":
                put_required(value, out, pointer, notes)
            case "additionalProperties" | "patternProperties" | "unevaluatedProperties":
                group = ("additionalProperties", "patternProperties", "unevaluatedProperties")
                if keyword == next(name for name in node if name in group):
                    put_other_properties(node, out, pointer, notes, self._child)
            case "items" | "prefixItems" | "additionalItems":
                if keyword == next(
                    name for name in node if name in ("items", "prefixItems", "additionalItems")
                ):
                    self._put_items(place)
            case "pattern":
                put_pattern(value, out, pointer, notes)
            case "format":
                put_format(value, out, pointer, notes)
            case "multipleOf":
                put_factor(value, out, pointer, notes)
            case _ if keyword in COUNTS:
                put_count(keyword, value, out, pointer, notes)
            case _ if keyword in BOUNDS:
                put_bound(keyword, value, out, node, pointer, notes)
            case _:
                self._put_other(keyword, value, place)

    def _put_other(self, keyword: str, value: Any, place: _Place) -> None:
        """A keyword that is not compiled."""
        node, pointer, notes = place.node, place.pointer, self._notes
        rule = KEYWORDS.get(keyword)
        if rule is None:
            notes.unknown(pointer, keyword, value)
        elif rule.fate is Fate.REFUSED:
            notes.refuse(pointer, keyword, rule.reason, rule.rewrite)
        elif keyword in ("$id", "id") and pointer and isinstance(value, str) and not value.startswith("#"):
            if keyword == "$id" and self._references.has_any:
                notes.refuse(
                    pointer, "$id", "references inside it would be counted from another place", "leave it out"
                )
            notes.found(pointer, keyword)
        elif keyword == "nullable" and value is True:
            notes.warn(
                pointer,
                keyword,
                f"nullable is not in JSON Schema, so that null is not allowed; {rule.rewrite}",
            )
        elif keyword in ("$defs", "definitions") and not isinstance(value, dict):
            notes.invalid(pointer, f"{keyword} is {shown(value)}, but it must be an object", keyword)
        elif rule.fate is Fate.ANNOTATION or self._is_neutral(keyword, value, node):
            notes.found(pointer, keyword, Fate.ENFORCED if rule.fate is not Fate.ANNOTATION else None)
        elif keyword == "not" and value in (True, {}):
            notes.found(pointer, keyword, Fate.ENFORCED)
            place.out.setdefault("allOf", []).append(False)
        else:
            self._check_skipped(keyword, value, pointer)
            notes.approximate(pointer, keyword)

    def _check_skipped(self, keyword: str, value: Any, pointer: str) -> None:
        """What is not enforced must still be what the standard says."""
        wrong = ""
        match keyword:
            case "not" | "if" | "then" | "else" | "contains":
                wrong = "" if isinstance(value, dict | bool) else "an object, or true or false"
            case "uniqueItems":
                wrong = "" if isinstance(value, bool) else "true or false"
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                wrong = "" if isinstance(value, dict) else "an object"
            case "minContains" | "maxContains":
                count(value, keyword, self._notes.path(pointer))
        if wrong:
            self._notes.invalid(pointer, f"{keyword} is {shown(value)}, but it must be {wrong}", keyword)

    def _is_neutral(self, keyword: str, value: Any, node: Members) -> bool:
        """Whether the keyword allows everything that the others allow."""
        match keyword:
            case "uniqueItems":
                most = node.get("maxItems")
                return value is False or (value is True and isinstance(most, int) and bool(most <= 1))
            case "not":
                return value is False
            case "contains":
                return (
                    node.get("minContains") == 0
                    and "maxContains" not in node
                    and isinstance(value, dict | bool)
                )
            case "minContains" | "maxContains":
                return "contains" not in node or (keyword == "minContains" and value in (0, 1))
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return bool(value == {})
            case "then" | "else":
                return "if" not in node or value in (True, {})
            case "if":
                return node.get("then", True) in (True, {}) and node.get("else", True) in (True, {})
        return False

    # ------------------------------------------------------------ keywords that lead to other places

    def _put_branches(self, keyword: str, value: Any, place: _Place) -> None:
        _, pointer, out, _ = place
        if not isinstance(value, list) or not value:
            self._notes.invalid(pointer, f"{keyword} must be a list with at least one schema", keyword)
        self._notes.found(pointer, keyword)
        branch = place.branch or keyword == "allOf" or self._restricts_more(place.node, keyword)
        out[keyword] = out.get(keyword, []) + [
            self._child(inner, pointer_to(pointer, keyword, i), branch=branch)
            for i, inner in enumerate(value)
        ]
        if keyword == "oneOf":
            self.one_ofs.append(out)

    def _restricts_more(self, node: Members, keyword: str) -> bool:
        """Whether a schema has another keyword than this one that restricts values."""
        return any(
            name != keyword and name in KEYWORDS and KEYWORDS[name].fate is not Fate.ANNOTATION
            for name in node
        )

    def _unwrap(self, out: Members) -> None:
        """A lone schema in an `allOf` or another list needs no list; recursive references could not be combined."""
        if len(out) != 1:
            return
        [(keyword, branches)] = out.items()
        if keyword in _COMBINING and len(branches) == 1 and isinstance(branches[0], dict):
            lone = branches[0]
            for i in reversed(range(len(self._pending))):  # it is among the last ones
                place = self._pending[i]
                if place.out is lone:
                    del out[keyword]
                    self._pending[i] = place._replace(out=out)
                    if keyword == "oneOf":  # the last one, too
                        self.one_ofs.pop()
                    return

    def _put_ref(self, value: Any, place: _Place) -> None:
        self._notes.found(place.pointer, "$ref")
        target, pointer = self._references.resolve(value, self._notes.path(place.pointer))
        if pointer not in self._numbers:
            number = str(len(self._numbers))
            self._numbers[pointer] = number
            self.definitions[number] = self._child(target, pointer)
        place.out["$ref"] = f"#/$defs/{self._numbers[pointer]}"

    def _put_names(self, value: Any, place: _Place) -> None:
        if not isinstance(value, dict | bool):
            self._notes.invalid(place.pointer, "propertyNames must be a schema", "propertyNames")
        hops = 0
        while isinstance(value, dict) and "$ref" in value and hops < 32:
            value, _ = self._references.resolve(value["$ref"], self._notes.path(place.pointer))
            hops += 1
        if place.branch and value not in (True, {}):
            self._notes.approximate(place.pointer, "propertyNames", "the schema is combined with others")
        else:
            put_names(value, place.out, place.pointer, self._notes)

    def _put_items(self, place: _Place) -> None:
        """`items`, `prefixItems` and `additionalItems` of all drafts."""
        node, pointer, out, _ = place
        items = node.get("items")
        keyword = "items" if isinstance(items, list) else "prefixItems"
        first = node.get(keyword, [])
        if not isinstance(first, list):
            self._notes.invalid(pointer, f"{keyword} is {shown(first)}, but it must be a list", keyword)
        if first:
            out["prefixItems"] = [
                self._child(inner, pointer_to(pointer, keyword, i)) for i, inner in enumerate(first)
            ]
        rest = "additionalItems" if isinstance(items, list) else "items"
        if rest in node:
            out["items"] = self._child(node[rest], pointer_to(pointer, rest))
        for name in ("items", "prefixItems", "additionalItems"):
            if name in node:
                self._notes.found(pointer, name)

    def _put_implied_type(self, place: _Place) -> None:
        """A schema without `type` means the type that its keywords are about.

        The standard lets `{"properties": ...}` accept every value that is no object; clients mean objects.
        """
        node, pointer, out, branch = place
        if branch or any(name in node for name in _TYPED):
            return
        kinds = _families(node)
        for inner in node["allOf"] if isinstance(node.get("allOf"), list) else ():
            if not isinstance(inner, dict) or any(name in inner for name in (*_TYPED, *_COMBINING)):
                return
            kinds |= _families(inner)
        if kinds:
            out["type"] = min(kinds) if len(kinds) == 1 else sorted(kinds)
            self._notes.found(
                pointer, "type", Fate.ENFORCED, f"no type is given; {' or '.join(sorted(kinds))} is meant"
            )


def _families(node: Members) -> set[str]:
    kinds = {FAMILIES[keyword] for keyword in node if keyword in FAMILIES}
    if isinstance(node.get("format"), str) and node["format"] in FORMATS:
        kinds.add("string")
    return kinds
