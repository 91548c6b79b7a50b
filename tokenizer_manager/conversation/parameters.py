"""`Parameters`: one reading of a tool's schema, for the grammars of its calls and for the parser of the answer.

Formats that write each argument by itself (tagged, pythonic) need more of a schema than JSON formats: the parameters
that may come, and the kinds of values of each one. A text is the value of the first kind that the schema allows and the
text spells, else a string. Grammar and parser ask the same questions here, so that a text that the grammar lets come
is read back as the value that the schema allows.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...grammar.schema.keywords import FAMILIES, FORMATS
from ...grammar.schema.references import References
from ...grammar.schema.report import SchemaError
from .conversation import Tool

CUSTOM_INPUT: Final = "input"
"""The argument of custom tools, which the model sees as functions with one text argument."""
NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}
_CUSTOM_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}

Kinds = frozenset[str]
"""Kinds of values: the types of JSON Schema, with "true" and "false" for boolean. "number" alone excludes integers."""
ALL_KINDS: Final[Kinds] = frozenset(
    ("string", "null", "true", "false", "integer", "number", "array", "object")
)
WORDS: Final = {"null": ("null", "None"), "true": ("true", "True"), "false": ("false", "False")}
"""Spellings of the kinds with one value, in JSON and in Python."""
_OF_TYPE: Final = {
    **{kind: (kind,) for kind in ("string", "null", "integer", "array", "object")},
    **dict.fromkeys(("boolean", "bool"), ("true", "false")),
    **dict.fromkeys(("number", "float"), ("integer", "number")),
    "str": ("string",),
    "int": ("integer",),
    "list": ("array",),
    "dict": ("object",),
    "none": ("null",),
}
"""Kinds of the types of JSON Schema, and of Python's, which clients send too, in any case; others allow everything."""
_OBJECT_KEYWORDS: Final = frozenset(
    keyword
    for keyword, kind in FAMILIES.items()
    if kind == "object" and keyword not in ("properties", "required")
) - {"additionalProperties", "maxProperties"}
_MAX_DEPTH: Final = 32  # of combinations and references
_MAX_PARTS: Final = 1024  # of one parameter: references to references unfold without end
_MAX_SHAPES: Final = 32


class Unenforceable(Exception):
    """A part of a schema that a format cannot follow; the message ends a sentence about the tool."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters that may come together.

    Attributes:
        properties: their schemas, by name.
        required: the names that must come.
        others: schema of parameters with other names; False: there are none.
    """

    properties: Mapping[str, Any]
    required: frozenset[str] = frozenset()
    others: Any = True


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments; of a custom tool: an object with one text."""
    if tool.custom:
        return _CUSTOM_PARAMETERS
    return tool.parameters or NO_PARAMETERS


class Parameters:
    """The parameters of one tool. A part of the schema that is none, or a dangling reference, allows everything.

    Attributes:
        shapes: alternatives for the parameters of a call; one, unless the schema combines others.
        unenforceable: the part of the schema that the shapes do not have; "" if they have all of it.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        """Read the schema of the arguments."""
        self._schema = schema
        self._references = References(schema)
        self._num_parts = 0
        self.unenforceable = ""
        try:
            self.shapes = _distinct(self._shapes(schema, 0))
        except Unenforceable as error:
            self.shapes = [self._plain(schema)]
            self.unenforceable = str(error)

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of the schema."""
        return list(dict.fromkeys(name for shape in self.shapes for name in shape.properties))

    def kinds(self, key: str) -> Kinds:
        """Kinds of the values of a parameter; all kinds if its schema has too many parts."""
        try:
            found = [self.kinds_of(shape.properties.get(key, shape.others)) for shape in self.shapes]
        except Unenforceable:
            return ALL_KINDS
        return frozenset().union(*found) or ALL_KINDS

    def kinds_of(self, schema: Any, depth: int = 0) -> Kinds:
        """Kinds of the values of a schema.

        Raises:
            Unenforceable: it has too many parts.
        """
        self._count_part(depth)
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return ALL_KINDS
        kinds = ALL_KINDS
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            named = [_OF_TYPE.get(str(name).lower(), ALL_KINDS) for name in types]
            kinds = frozenset(kind for each in named for kind in each)
        for values in listed_values(schema):
            kinds &= frozenset(kind_of(value) for value in values)
        if (target := self.target_of(schema)) is not None:
            kinds &= self.kinds_of(target, depth + 1)
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches = [self.kinds_of(each, depth + 1) for each in branches_of(schema, keyword)]
            if branches:
                joined = frozenset.intersection if keyword == "allOf" else frozenset.union
                kinds &= joined(*branches)
        if kinds == ALL_KINDS:  # without a type, a schema means the type of its keywords
            families = {FAMILIES[keyword] for keyword in schema if keyword in FAMILIES}
            if schema.get("format") in FORMATS:
                families.add("string")
            if families:
                return frozenset(kind for name in families for kind in _OF_TYPE[name])
        return kinds

    def narrowed(self, schema: Any, kinds: Kinds, depth: int = 0) -> Any:
        """The schema of those values of `schema` that are of these kinds."""
        own = self.kinds_of(schema)
        if own <= kinds or not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return schema
        if (target := self.target_of(schema)) is not None and len(schema) == 1:
            return self.narrowed(target, kinds, depth + 1)
        result = dict(schema)
        for keyword in ("anyOf", "oneOf"):
            if branches := branches_of(schema, keyword):
                kept = [each for each in branches if self.kinds_of(each) & kinds]
                result[keyword] = [self.narrowed(each, kinds, depth + 1) for each in kept]
        for keyword in ("enum", "const"):
            if keyword in schema:
                values = schema[keyword] if keyword == "enum" else [schema["const"]]
                result.pop(keyword)
                result["enum"] = [value for value in values if kind_of(value) in kinds]
        types = sorted(_types_of(own & kinds))
        result["type"] = types[0] if len(types) == 1 else types
        return result

    def target_of(self, schema: Mapping[str, Any]) -> Any:
        """The schema that a reference names; None for no reference."""
        if "$ref" not in schema:
            return None
        try:
            return self._references.resolve(schema["$ref"], "")[0]
        except SchemaError:
            return True

    def whole(self, schema: Any) -> dict[str, Any]:
        """A part of the schema, with the definitions that its references need."""
        definitions: dict[str, Any] = {
            key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema
        }
        return {**definitions, **schema} if isinstance(schema, dict) else definitions

    def _count_part(self, depth: int) -> None:
        self._num_parts = self._num_parts + 1 if depth else 1
        if self._num_parts > _MAX_PARTS:
            raise Unenforceable(f"a schema of more than {_MAX_PARTS:,} parts")

    # ------------------------------------------------------------ shapes

    def _shapes(self, schema: Any, depth: int) -> list[Shape]:
        self._count_part(depth)
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [Shape({})]
        if depth > _MAX_DEPTH:
            raise Unenforceable("a recursive reference at the top of its schema")
        for keyword in (*_OBJECT_KEYWORDS, "enum", "const", "not", "if"):
            if keyword in schema:
                raise Unenforceable(f"{keyword} at the top of its schema")
        shapes = [self._plain(schema)]
        most = schema.get("maxProperties")
        if isinstance(most, int) and most < len({*shapes[0].properties, *shapes[0].required}):
            raise Unenforceable("maxProperties at the top of its schema")
        if (target := self.target_of(schema)) is not None:
            shapes = _combined(shapes, self._shapes(target, depth + 1))
        for each in branches_of(schema, "allOf"):
            shapes = _combined(shapes, self._shapes(each, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if branches := branches_of(schema, keyword):
                shapes = _combined(
                    shapes, [one for each in branches for one in self._shapes(each, depth + 1)]
                )
        return shapes

    def _plain(self, schema: Mapping[str, Any]) -> Shape:
        """The shape of the keywords of this level alone."""
        properties, required = schema.get("properties"), schema.get("required")
        return Shape(
            properties if isinstance(properties, dict) else {},
            frozenset(map(str, required)) if isinstance(required, list) else frozenset(),
            schema.get("additionalProperties", True),
        )


def _combined(shapes: list[Shape], others: list[Shape]) -> list[Shape]:
    """Shapes that fit one of each list."""
    if len(shapes) * len(others) > _MAX_SHAPES:
        raise Unenforceable(f"more than {_MAX_SHAPES} combinations of parameters")
    return [both for one in shapes for other in others if (both := _both(one, other)) is not None]


def _both(one: Shape, other: Shape) -> Shape | None:
    required = one.required | other.required
    properties: dict[str, Any] = {}
    for key in dict.fromkeys((*one.properties, *other.properties)):
        schema = _all_of(one.properties.get(key, one.others), other.properties.get(key, other.others))
        if schema is False and key in required:
            return None
        properties[key] = schema
    return Shape(properties, required, _all_of(one.others, other.others))


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one in (True, {}) or one == other:
        return other
    return one if other in (True, {}) else {"allOf": [one, other]}


def _distinct(shapes: list[Shape]) -> list[Shape]:
    return [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]


def branches_of(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """The schemas in a list such as `anyOf`."""
    branches = schema.get(keyword)
    return branches if isinstance(branches, list) else []


def listed_values(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The values of `enum` and of `const`."""
    if isinstance(schema.get("enum"), list):
        yield schema["enum"]
    if "const" in schema:
        yield [schema["const"]]


def _types_of(kinds: Kinds) -> set[str]:
    names = {"true": "boolean", "false": "boolean"}
    return {names.get(kind, kind) for kind in kinds} - ({"integer"} if "number" in kinds else set())


# ------------------------------------------------------------ values


def kind_of(value: object) -> str:
    """The kind of a value as `json.loads` returns it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "string"
        case int() | float():
            return "integer" if value == value // 1 else "number"
        case list() | tuple():
            return "array"
        case dict():
            return "object"
    return ""


def json_of(text: str, kinds: Kinds, *, quoted: bool = False) -> str:
    """JSON of a value as a model wrote it.

    Args:
        text: of one argument.
        kinds: that the schema allows.
        quoted: strings have quotes in this format; if not, a string is its text, and so is everything else that spells
            no value of these kinds.
    """
    for value, found in _readings(text, literals=quoted or "string" not in kinds):
        kind = kind_of(value)
        if kind in kinds and (quoted or kind != "string"):
            return found
        if quoted and "string" not in kinds:
            return found  # of no kind that the schema allows; it is what the model wrote
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str, *, literals: bool) -> Iterator[tuple[Any, str]]:
    """The text as JSON, then as a Python literal: value and JSON. NaN, infinities and names are neither."""
    text = text.strip()
    text = next((word for word, spellings in WORDS.items() if text in spellings), text)
    repeated: list[bool] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        repeated.append(len(result) < len(pairs))
        return result

    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=members)
        yield value, _dumped(value) if any(repeated) else text
        return
    except (ValueError, RecursionError):
        pass
    if literals:
        try:
            value = ast.literal_eval(text)
            dumped = _dumped(value)
            yield json.loads(dumped), dumped
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass


def _dumped(value: object) -> str:
    """JSON with each name once and without halves of surrogate pairs.

    Raises:
        ValueError, TypeError: the value has no JSON.
    """
    dumped = json.dumps(json.loads(json.dumps(value, allow_nan=False)), ensure_ascii=False)
    return dumped.encode("utf-8", "replace").decode()


def _refuse_constant(name: str) -> float:
    raise ValueError(name)
