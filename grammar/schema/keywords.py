"""The keywords of JSON Schema (draft 4 to 2020-12) and what becomes of each: the table of docs/structured_output.md.

What is enforced was found by experiment with llguidance 1.9.1 and the JSON-Schema test suite
(tests/grammar/schema/test_suite.py); `check.py` applies the table.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class Fate(enum.StrEnum):
    """What becomes of a keyword.

    ENFORCED: no answer violates it. APPROXIMATED: not enforced, or not fully; with `strict` it is an error, otherwise a
    warning. ANNOTATION: it does not restrict documents. REFUSED: always an error.
    """

    ENFORCED = "enforced"
    APPROXIMATED = "approximated"
    ANNOTATION = "annotation"
    REFUSED = "refused"


class Keyword(NamedTuple):
    """The rule for one keyword.

    Attributes:
        reason: why it is not enforced, or what to know about it.
        rewrite: the smallest change of a schema that makes it enforceable.
    """

    fate: Fate
    reason: str = ""
    rewrite: str = ""


_ENFORCED: Final = Keyword(Fate.ENFORCED)
_ANNOTATION: Final = Keyword(Fate.ANNOTATION)
_ABOUT_OTHERS: Final = "it depends on other parts of the document"

KEYWORDS: Final[dict[str, Keyword]] = {
    # values
    "type": _ENFORCED,
    "enum": Keyword(Fate.ENFORCED, "numbers up to 2^53"),
    "const": Keyword(Fate.ENFORCED, "numbers up to 2^53"),
    # combinations
    "anyOf": _ENFORCED,
    "allOf": Keyword(Fate.ENFORCED, "a recursive $ref inside it is not combined with other schemas"),
    "oneOf": Keyword(
        Fate.ENFORCED,
        "where no two branches can both match; treated as anyOf otherwise",
        "use anyOf, or give each branch a required property with another const",
    ),
    "not": Keyword(
        Fate.APPROXIMATED, "a grammar cannot exclude values", "list what is allowed with enum or anyOf"
    ),
    "if": Keyword(
        Fate.APPROXIMATED, "conditions are not enforced", "use anyOf with one branch for each case"
    ),
    "then": Keyword(
        Fate.APPROXIMATED, "conditions are not enforced", "use anyOf with one branch for each case"
    ),
    "else": Keyword(
        Fate.APPROXIMATED, "conditions are not enforced", "use anyOf with one branch for each case"
    ),
    "dependentRequired": Keyword(
        Fate.APPROXIMATED, _ABOUT_OTHERS, "use anyOf with one branch for each set of properties"
    ),
    "dependentSchemas": Keyword(
        Fate.APPROXIMATED, _ABOUT_OTHERS, "use anyOf with one branch for each set of properties"
    ),
    "dependencies": Keyword(
        Fate.APPROXIMATED, _ABOUT_OTHERS, "use anyOf with one branch for each set of properties"
    ),
    # references
    "$ref": Keyword(Fate.ENFORCED, "inside the schema: #, #/pointer or #anchor"),
    "$dynamicRef": Keyword(Fate.REFUSED, "dynamic references are not supported", "use $ref"),
    "$recursiveRef": Keyword(Fate.REFUSED, "dynamic references are not supported", "use $ref"),
    # objects
    "properties": Keyword(Fate.ENFORCED, "in the schema's order"),
    "required": _ENFORCED,
    "additionalProperties": _ENFORCED,
    "patternProperties": Keyword(
        Fate.ENFORCED,
        "where one pattern, or patterns with different beginnings, are given",
        "make the patterns begin with ^ and different texts",
    ),
    "propertyNames": Keyword(
        Fate.ENFORCED,
        "where it has only a pattern or an enum, and the object has no properties or patternProperties",
        "use patternProperties with additionalProperties: false",
    ),
    "minProperties": Keyword(
        Fate.ENFORCED,
        "where all listed properties are required, and for at most one more; a generated name may repeat",
        "list properties under required",
    ),
    "maxProperties": Keyword(
        Fate.ENFORCED, "where all listed properties are required", "list properties under required"
    ),
    "unevaluatedProperties": Keyword(
        Fate.ENFORCED,
        "where it is the same as additionalProperties",
        "use additionalProperties, with all properties in one object",
    ),
    # arrays
    "items": _ENFORCED,
    "prefixItems": _ENFORCED,
    "additionalItems": _ENFORCED,
    "minItems": _ENFORCED,
    "maxItems": _ENFORCED,
    "uniqueItems": Keyword(
        Fate.APPROXIMATED,
        "a grammar does not remember earlier items",
        "leave it out, and remove repeated items",
    ),
    "contains": Keyword(Fate.APPROXIMATED, "a grammar does not count items", "use prefixItems for the item"),
    "minContains": Keyword(
        Fate.APPROXIMATED, "a grammar does not count items", "use prefixItems for the items"
    ),
    "maxContains": Keyword(Fate.APPROXIMATED, "a grammar does not count items", "use maxItems"),
    "unevaluatedItems": Keyword(
        Fate.ENFORCED, "where it is the same as items", "use items, with all items in one array"
    ),
    # strings
    "minLength": _ENFORCED,
    "maxLength": _ENFORCED,
    "pattern": Keyword(
        Fate.ENFORCED,
        "without look-around, back-references and word boundaries",
        "write the pattern without them",
    ),
    "format": Keyword(Fate.ENFORCED, "for the formats below", "use pattern"),
    # numbers
    "minimum": Keyword(Fate.ENFORCED, "up to 2^53"),
    "maximum": Keyword(Fate.ENFORCED, "up to 2^53"),
    "exclusiveMinimum": Keyword(Fate.ENFORCED, "up to 2^53"),
    "exclusiveMaximum": Keyword(Fate.ENFORCED, "up to 2^53"),
    "multipleOf": _ENFORCED,
    # places and annotations
    "$defs": _ANNOTATION,
    "definitions": _ANNOTATION,
    "$anchor": _ANNOTATION,
    "$dynamicAnchor": _ANNOTATION,
    "$recursiveAnchor": _ANNOTATION,
    "$id": Keyword(Fate.ANNOTATION, "inside of the schema, only without $ref"),
    "id": _ANNOTATION,
    "$schema": _ANNOTATION,
    "$vocabulary": _ANNOTATION,
    "$comment": _ANNOTATION,
    "title": _ANNOTATION,
    "description": _ANNOTATION,
    "default": _ANNOTATION,
    "examples": _ANNOTATION,
    "deprecated": _ANNOTATION,
    "readOnly": _ANNOTATION,
    "writeOnly": _ANNOTATION,
    "contentEncoding": _ANNOTATION,
    "contentMediaType": _ANNOTATION,
    "contentSchema": _ANNOTATION,
    # OpenAPI and other tools
    "discriminator": _ANNOTATION,
    "example": _ANNOTATION,
    "externalDocs": _ANNOTATION,
    "xml": _ANNOTATION,
    "nullable": Keyword(
        Fate.ANNOTATION, "JSON Schema does not have it, so that null is not allowed", 'add "null" to type'
    ),
}
"""Keyword -> its usual fate. Unknown keywords are annotations in the standard; here they get a warning, since most are
misspelled, and are refused with `strict`. Names that begin with `x-` are annotations."""

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Values of `format` that are enforced."""

_DATE: Final = (
    "(?:[0-9]{4}-(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
FORMAT_PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": f"^{_DATE}[Tt][0-9]{{2}}:[0-9]{{2}}:[0-5]",
}
"""What the library's formats must match too: it allows 2021-02-29, and :60 at times without a leap second."""

ANNOTATION_FORMATS: Final = frozenset({"password", "float", "double", "binary", "textarea", "markdown"})
"""Values of `format` that do not restrict documents."""

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

FAMILIES: Final[dict[str, str]] = {
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"), "object"),
    **dict.fromkeys(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"), "array"
    ),
    **dict.fromkeys(("contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
"""Keyword -> the type that a schema without `type` is taken to mean if it has the keyword."""
