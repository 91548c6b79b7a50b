"""The keywords of JSON Schema (draft 4 to 2020-12) and what becomes of each: the table of docs/structured_output.md.

What is enforced was found by experiment with llguidance 1.9.1 and the JSON-Schema test suite
(tests/grammar/schema/test_suite.py); `check.py` applies the table.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class Fate(enum.StrEnum):
    """Treatment of a keyword.

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


def _enforced(reason: str = "", rewrite: str = "") -> Keyword:
    return Keyword(Fate.ENFORCED, reason, rewrite)


def _approximated(reason: str, rewrite: str) -> Keyword:
    return Keyword(Fate.APPROXIMATED, reason, rewrite)


_DYNAMIC: Final = Keyword(Fate.REFUSED, "dynamic references are not supported", "use $ref")
_CONDITION: Final = _approximated("conditions are not enforced", "use anyOf with one branch for each case")
_DEPENDENT: Final = _approximated(
    "it depends on other parts of the document", "use anyOf with one branch for each set of properties"
)
_EXACT: Final = _enforced("up to 2^53")
_NOT_COUNTED: Final = "a grammar does not count items"
_ANNOTATIONS: Final = (
    *("$defs", "definitions", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$id", "id", "$schema"),
    *("$vocabulary", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
    *("discriminator", "example", "externalDocs", "xml"),  # OpenAPI and other tools
)

KEYWORDS: Final[dict[str, Keyword]] = {
    # values
    "type": _enforced(),
    "enum": _enforced("numbers up to 2^53"),
    "const": _enforced("numbers up to 2^53"),
    # combinations
    "anyOf": _enforced(),
    "allOf": _enforced("a recursive $ref inside it is not combined with other schemas"),
    "oneOf": _enforced(
        "where no two branches can both match, or each requires a name of its own; else as anyOf",
        "use anyOf, or require a different const in each branch",
    ),
    "not": _approximated("a grammar cannot exclude values", "list what is allowed with enum or anyOf"),
    "if": _CONDITION,
    "then": _CONDITION,
    "else": _CONDITION,
    "dependentRequired": _DEPENDENT,
    "dependentSchemas": _DEPENDENT,
    "dependencies": _DEPENDENT,
    # references
    "$ref": _enforced("inside the schema: #, #/pointer or #anchor"),
    "$dynamicRef": _DYNAMIC,
    "$recursiveRef": _DYNAMIC,
    # objects
    "properties": _enforced("in the schema's order"),
    "required": _enforced(),
    "additionalProperties": _enforced(),
    "patternProperties": _enforced(
        "for one pattern, or patterns with different beginnings",
        "begin patterns with ^ and different texts",
    ),
    "propertyNames": _enforced(
        "where a pattern or enum is the only rule of names",
        "use patternProperties with additionalProperties: false",
    ),
    "minProperties": _enforced(
        "where all listed properties are required, and up to one more",
        "list properties under required",
    ),
    "maxProperties": _enforced("where all listed properties are required", "list properties under required"),
    "unevaluatedProperties": _enforced(
        "where it is the same as additionalProperties",
        "use additionalProperties, with all in one object",
    ),
    # arrays
    "items": _enforced(),
    "prefixItems": _enforced(),
    "additionalItems": _enforced(),
    "minItems": _enforced(),
    "maxItems": _enforced(),
    "uniqueItems": _approximated(
        "a grammar does not remember earlier items", "leave it out, and remove repeated items"
    ),
    "contains": _approximated(_NOT_COUNTED, "use prefixItems for the item"),
    "minContains": _approximated(_NOT_COUNTED, "use prefixItems for the items"),
    "maxContains": _approximated(_NOT_COUNTED, "use maxItems"),
    "unevaluatedItems": _enforced("where it is the same as items", "use items, with all items in one array"),
    # strings
    "minLength": _enforced(),
    "maxLength": _enforced(),
    "pattern": _enforced(
        "without look-around, back-references and word boundaries", "write the pattern without them"
    ),
    "format": _enforced("for the formats below", "use pattern"),
    # numbers
    "minimum": _EXACT,
    "maximum": _EXACT,
    "exclusiveMinimum": _EXACT,
    "exclusiveMaximum": _EXACT,
    "multipleOf": _enforced(),
    # annotations
    **dict.fromkeys(_ANNOTATIONS, Keyword(Fate.ANNOTATION)),
    "$id": Keyword(Fate.ANNOTATION, "inside of the schema, only without $ref"),
    "nullable": Keyword(
        Fate.ANNOTATION, "JSON Schema does not have it, so that null is not allowed", 'add "null" to type'
    ),
}
"""Keyword -> its usual fate. Unknown keywords are annotations in the standard; here they get a warning, since most are
misspelled, and are refused with `strict`. Names that begin with `x-` are annotations."""

_DATE: Final = (
    "(?:[0-9]{4}-(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
FORMAT_PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": "^P(?:T?[0-9]{1,9}[A-Z])+$",
    "email": "^[^@]{1,64}@[^.]{1,63}(?:[.][^.]{1,63})*$",
}
"""Patterns besides the library's formats: it allows 2021-02-29, :60 at times without a leap second, digits without end
in a fraction or a duration, with which a weak model fills its limit of tokens, and long parts of an e-mail address."""
FORMAT_MAX_CHARS: Final = {"email": 254, "hostname": 253}
"""As RFC 5321 and RFC 1035 have them; the library has no bound."""

FORMAT_SAMPLES: Final = {
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "date": "2000-01-01",
    "duration": "P1D",
    "email": "a@a.aa",
    "hostname": "a",
    "ipv4": "1.1.1.1",
    "ipv6": "::",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "uri": "a:a",
}
FORMATS: Final = frozenset(FORMAT_SAMPLES)
"""Values of `format` that are enforced."""

ANNOTATION_FORMATS: Final = frozenset({"password", "float", "double", "binary", "textarea", "markdown"})
"""Values of `format` that do not restrict documents."""

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

_KEYWORDS_OF_TYPE: Final = {
    "object": "properties required additionalProperties patternProperties minProperties maxProperties propertyNames "
    "unevaluatedProperties",
    "array": "items prefixItems additionalItems minItems maxItems uniqueItems contains unevaluatedItems",
    "string": "minLength maxLength pattern",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
FAMILIES: Final = {
    keyword: kind for kind, keywords in _KEYWORDS_OF_TYPE.items() for keyword in keywords.split()
}
"""Keyword -> the type that a schema without `type` is taken to mean if it has the keyword."""
