"""`SchemaWalk`: goes over a schema, place by place, and writes the schema to compile.

The written schema has only keywords that are enforced, in one form each: `prefixItems` and `items` for all drafts,
numbers for exclusive bounds, and every `$ref` as `#/$defs/<number>`. Its order is the client's: it is the order of
properties in answers.
"""

from __future__ import annotations

from typing import Any, Final

from . import rules
from .keywords import FAMILIES, FORMATS, KEYWORDS, Fate
from .references import References
from .report import Members, Notes, Place, Schema, shown

MAX_POINTER_CHARS: Final = 4096
"""Longest path to a place. The pointers of all places are kept, and each has the names of the objects around it."""
MAX_HOPS: Final = 32
"""Longest chain of references from `propertyNames` on."""
_COMBINING: Final = ("allOf", "anyOf", "oneOf")
_TYPED: Final = ("type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef")
_IN_ORDER: Final = ("type", "propertyNames", "minProperties", "maxProperties", "unevaluatedItems")
"""Written before or after the others."""
_SKIPPED_VALUES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    **dict.fromkeys(("not", "if", "then", "else", "contains"), ((dict, bool), "an object, or true or false")),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ((dict,), "an object")),
    "uniqueItems": ((bool,), "true or false"),
}
"""Values of keywords that are not enforced, as the standard has them."""


class SchemaWalk:
    """One walk.

    Attributes:
        definitions: number -> written schema that a `$ref` names.
        pointers: id of a written object -> its place.
        one_ofs: written objects with `oneOf`.
    """

    def __init__(self, root: Any, notes: Notes, *, closed: bool = False) -> None:
        self._root = root
        self._closed = closed
        self._notes = notes
        self._references = References(root)
        self._pending: list[Place] = []
        self._numbers: dict[str, str] = {}  # pointer of a target -> its number
        self.definitions: dict[str, Schema] = {}
        self.pointers: dict[int, str] = {}
        self.one_ofs: list[Members] = []

    def written(self) -> Schema:
        """The schema to compile, without `$defs`.

        Raises:
            SchemaError: it is no schema, or it is refused.
        """
        out = self._add(self._root, "")
        while self._pending:
            self._write(self._pending.pop())
        return out

    def _add(self, node: Any, pointer: str, branch: bool = False) -> Schema:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            text = f"the schema is {shown(node)}, but a schema is an object, or true or false"
            self._notes.refuse("invalid_schema", pointer, text)
        if len(pointer) > MAX_POINTER_CHARS:
            text = f"the path to this place has more than {MAX_POINTER_CHARS:,} characters, which is the limit; use "
            self._notes.refuse("schema_too_complex", pointer[:200] + "…", text + "shorter names")
        out: Members = {}
        self.pointers[id(out)] = pointer
        self._pending.append(Place(node, pointer, out, branch, self._notes, self._add))
        return out

    def _write(self, place: Place) -> None:
        node, out = place.node, place.out
        if "type" in node:  # first, since others depend on it
            rules.put_type(place)
        else:
            self._put_implied_type(place)
        for keyword, value in node.items():
            if not isinstance(keyword, str):
                place.invalid(f"the key {keyword!r} is no string")
            self._put(keyword, value, place)
        if "propertyNames" in node:
            self._put_names(node["propertyNames"], place)
        if "minProperties" in node or "maxProperties" in node:
            rules.put_property_counts(place)
        if "unevaluatedItems" in node:
            rules.put_unevaluated("unevaluatedItems", "items", place)
        if self._closed and "properties" in node and not place.branch and _says_nothing_of_others(node):
            out["additionalProperties"] = False
        rules.check_ranges(place)
        self._unwrap(out)

    def _put(self, keyword: str, value: Any, place: Place) -> None:
        if rule := rules.RULES.get(keyword):
            rule(keyword, value, place)
        elif keyword in _COMBINING:
            self._put_branches(keyword, value, place)
        elif keyword == "$ref":
            self._put_ref(value, place)
        elif keyword not in _IN_ORDER:
            self._put_other(keyword, value, place)

    def _put_other(self, keyword: str, value: Any, place: Place) -> None:
        """Note a keyword that is not compiled."""
        rule = KEYWORDS.get(keyword)
        if rule is None:
            self._notes.unknown(place.pointer, keyword)
        elif rule.fate is Fate.REFUSED:
            place.unsupported(keyword, rule.reason, rule.rewrite)
        elif keyword == "$id" and self._is_inner_id(value, place) and self._references.has_any:
            reason = "references inside it would be counted from another place"
            place.unsupported("$id", reason, "leave it out")
        elif keyword == "nullable" and value is True:
            text = f"nullable is not in JSON Schema, so that null is not allowed; {rule.rewrite}"
            self._notes.warn(place.pointer, keyword, text)
        elif keyword in ("$defs", "definitions") and not isinstance(value, dict):
            place.invalid(f"{keyword} is {shown(value)}, but it must be an object", keyword)
        elif rule.fate is Fate.ANNOTATION:
            place.found(keyword)
        elif _is_neutral(keyword, value, place.node):
            place.found(keyword, Fate.ENFORCED)
        elif keyword == "not" and value in (True, {}):
            place.found(keyword, Fate.ENFORCED)
            place.out.setdefault("allOf", []).append(False)
        else:
            _check_skipped(keyword, value, place)
            place.approximate(keyword)

    def _is_inner_id(self, value: Any, place: Place) -> bool:
        return bool(place.pointer) and isinstance(value, str) and not value.startswith("#")

    def _put_implied_type(self, place: Place) -> None:
        """Write the type that the keywords of a schema without `type` are about.

        The standard lets `{"properties": ...}` accept every value that is no object; clients mean objects.
        """
        node = place.node
        if place.branch or any(name in node for name in _TYPED):
            return
        kinds = _families(node)
        for inner in node["allOf"] if isinstance(node.get("allOf"), list) else ():
            if not isinstance(inner, dict) or any(name in inner for name in (*_TYPED, *_COMBINING)):
                return
            kinds |= _families(inner)
        if kinds:
            place.out["type"] = min(kinds) if len(kinds) == 1 else sorted(kinds)
            place.found("type", Fate.ENFORCED, f"no type is given; {' or '.join(sorted(kinds))} is meant")

    # ------------------------------------------------------------ keywords that lead to other places

    def _put_branches(self, keyword: str, value: Any, place: Place) -> None:
        if not isinstance(value, list) or not value:
            place.invalid(f"{keyword} must be a list with at least one schema", keyword)
        place.found(keyword)
        restricts_more = any(
            name != keyword and name in KEYWORDS and KEYWORDS[name].fate is not Fate.ANNOTATION
            for name in place.node
        )
        branch = place.branch or keyword == "allOf" or restricts_more
        place.out[keyword] = place.out.get(keyword, []) + [
            place.child(inner, keyword, i, branch=branch) for i, inner in enumerate(value)
        ]
        if keyword == "oneOf":
            self.one_ofs.append(place.out)

    def _unwrap(self, out: Members) -> None:
        """A lone schema in an `allOf` or another list needs no list; recursive references could not be combined."""
        if len(out) != 1:
            return
        [(keyword, branches)] = out.items()
        if keyword in _COMBINING and len(branches) == 1 and isinstance(branches[0], dict):
            for place in reversed(self._pending):  # it is among the last ones
                if place.out is branches[0]:
                    del out[keyword]
                    place.out = out
                    if keyword == "oneOf":  # the last one, too
                        self.one_ofs.pop()
                    return

    def _put_ref(self, value: Any, place: Place) -> None:
        place.found("$ref")
        target, pointer = self._references.resolve(value, self._notes.at + place.pointer)
        if pointer not in self._numbers:
            self._numbers[pointer] = number = str(len(self._numbers))
            self.definitions[number] = self._add(target, pointer)
        place.out["$ref"] = f"#/$defs/{self._numbers[pointer]}"

    def _put_names(self, value: Any, place: Place) -> None:
        if not isinstance(value, dict | bool):
            place.invalid("propertyNames must be a schema", "propertyNames")
        hops = 0
        while isinstance(value, dict) and "$ref" in value and hops < MAX_HOPS:
            value, _ = self._references.resolve(value["$ref"], self._notes.at + place.pointer)
            hops += 1
        if place.branch and value not in (True, {}):
            place.approximate("propertyNames", "the schema is combined with others")
        else:
            rules.put_names(value, place)


def _says_nothing_of_others(node: Members) -> bool:
    return not any(name in node for name in (*rules.OTHER_PROPERTIES, *_COMBINING, "$ref"))


def _check_skipped(keyword: str, value: Any, place: Place) -> None:
    """Refuse a value that the standard does not allow, also of a keyword that is not enforced."""
    if keyword in ("minContains", "maxContains"):
        rules.count(value, keyword, place)
        return
    kinds, text = _SKIPPED_VALUES[keyword]
    if not isinstance(value, kinds):
        place.invalid(f"{keyword} is {shown(value)}, but it must be {text}", keyword)


def _is_neutral(keyword: str, value: Any, node: Members) -> bool:
    """Whether the keyword allows everything that the others allow."""
    match keyword:
        case "uniqueItems":
            most = node.get("maxItems")
            return value is False or (value is True and isinstance(most, int) and bool(most <= 1))
        case "not":
            return value is False
        case "contains":
            is_schema = isinstance(value, dict | bool)
            return node.get("minContains") == 0 and "maxContains" not in node and is_schema
        case "minContains" | "maxContains":
            return "contains" not in node or (keyword == "minContains" and value in (0, 1))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
        case "then" | "else":
            return "if" not in node or value in (True, {})
        case "if":
            return node.get("then", True) in (True, {}) and node.get("else", True) in (True, {})
    return False


def _families(node: Members) -> set[str]:
    kinds = {FAMILIES[keyword] for keyword in node if keyword in FAMILIES}
    if isinstance(node.get("format"), str) and node["format"] in FORMATS:
        kinds.add("string")
    return kinds
