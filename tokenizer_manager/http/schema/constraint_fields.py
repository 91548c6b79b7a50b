"""`ConstraintFields`: request fields that constrain an answer, spelled as in OpenAI, SGLang, vLLM and llama.cpp.

`asked_constraint` finds the one that a request uses; `constraints` says what it means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from ....runtime.errors import RequestError
from .field_policy import NOTHING
from .values import show, without_nulls


class ConstraintFields(msgspec.Struct, kw_only=True):
    """At most one of them may be set, apart from the patterns for whitespace."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    complete_json: bool | None = (
        None  # ours; true unless set: JSON is complete also when it ends by its limit of tokens
    )


_FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")


_STRUCTURED: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


_TYPED: Final = ("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf")
"""Keywords that say which values a schema is about."""

_OPTIONS: Final = (
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_fallback",
    "disable_additional_properties",
)


class Asked(NamedTuple):
    """One constraint of a request.

    Attributes:
        kind: json, json_object, regex, choice, grammar or structural_tag.
        strict: the client asks for exact enforcement.
    """

    kind: str
    value: Any
    param: str
    strict: bool = False


def asked_constraint(
    fields: ConstraintFields, prefix: str, warnings: list[str], *, strict: bool
) -> Asked | None:
    """The constraint that a request asks for, in whichever of its fields; None for free text.

    Raises:
        RequestError: two fields constrain the answer, or one has a wrong form; names the client's path.
    """
    found: list[Asked] = []
    for name, kind in (
        ("guided_json", "json"),
        ("json_schema", "json"),
        ("guided_regex", "regex"),
        ("regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
        ("grammar", "grammar"),
        ("ebnf", "grammar"),
        ("structural_tag", "structural_tag"),
    ):
        value = getattr(fields, name)
        if value not in NOTHING:
            found.append(Asked(kind, value, prefix + name))
    if fields.response_format is not None:
        asked = _of_response_format(
            fields.response_format, f"{prefix}response_format", warnings, strict=strict
        )
        found += [asked] if asked is not None else []
    if fields.structured_outputs is not None:
        found += _of_structured_outputs(
            fields.structured_outputs, f"{prefix}structured_outputs", warnings, strict=strict
        )
    if len(found) > 1:
        raise RequestError(
            f"{found[0].param} and {found[1].param} both constrain the answer; send one of them",
            param=found[1].param,
            code="conflicting_constraints",
        )
    return found[0] if found else None


def _of_response_format(
    value: dict[str, Any], param: str, warnings: list[str], *, strict: bool
) -> Asked | None:
    value = without_nulls(value)
    kind = value.get("type")
    if kind not in _FORMATS:
        raise RequestError(
            f"{param}.type is {show(kind)}, but it must be one of {', '.join(_FORMATS)}",
            param=f"{param}.type",
            code="missing_field" if kind is None else "invalid_value",
        )
    if kind == "structural_tag":
        return Asked(kind, value, param)
    nested = value.get("json_schema")
    _check_names(
        value, ("type", "json_schema", "schema", "name", "strict", "description"), param, warnings, strict
    )
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("schema") is not None:  # llama.cpp's spelling of json_schema
            schema = _of_objects(value["schema"])
            return Asked("json", schema, f"{param}.schema", flag_of(value, "strict", param))
        return Asked("json_object", None, param)
    if nested is None and value.get("schema") is not None:  # flat, as in /v1/responses
        nested, inner = value, param
    else:
        inner = f"{param}.json_schema"
        if not isinstance(nested, dict):
            raise unusable(nested, inner, "an object with a schema")
        nested = without_nulls(nested)
        _check_names(nested, ("name", "schema", "strict", "description"), inner, warnings, strict)
    if nested.get("schema") is None:
        raise unusable(None, f"{inner}.schema", "a JSON Schema")
    return Asked("json", nested["schema"], f"{inner}.schema", flag_of(nested, "strict", inner))


def _of_objects(schema: Any) -> Any:
    """A schema beside the type `json_object`, which it may leave out."""
    if schema is True:
        return {"type": "object"}
    if isinstance(schema, dict) and not any(name in schema for name in _TYPED):
        return {"type": "object", **schema}
    return schema


def _of_structured_outputs(
    value: dict[str, Any], param: str, warnings: list[str], *, strict: bool
) -> Iterator[Asked]:
    value = without_nulls(value)
    _check_names(value, (*_STRUCTURED, *_OPTIONS), param, warnings, strict)
    for kind in _STRUCTURED:
        inner = value.get(kind)
        path = f"{param}.{kind}"
        if kind == "json_object":
            if flag_of(value, kind, param):
                yield Asked(kind, None, path)
        elif inner not in NOTHING:
            wanted = {
                "json": (dict | str | bool, "a JSON Schema, as an object or a string"),
                "structural_tag": (dict | str, "an object or a string with JSON"),
                "choice": (list, "a list of strings"),
            }.get(kind, (str, "a string"))
            if not isinstance(inner, wanted[0]) or (
                kind == "choice" and not all(isinstance(c, str) for c in inner)
            ):
                raise unusable(inner, path, wanted[1])
            yield Asked(kind, inner, path)


def _check_names(
    value: dict[str, Any], known: tuple[str, ...], param: str, warnings: list[str], strict: bool
) -> None:
    for name in value:
        if name not in known:
            if strict:
                raise RequestError(
                    f"{param}.{name} is not a field of this request; leave it out, or run the server without --strict",
                    param=f"{param}.{name}",
                    code="unknown_field",
                )
            warnings.append(f"unknown field {param}.{name[:100]} was ignored")


def flag_of(value: dict[str, Any], name: str, param: str) -> bool:
    """A boolean member of an object; false if it is missing."""
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise unusable(flag, f"{param}.{name}", "true or false")
    return bool(flag)


def unusable(value: object, param: str, wanted: str) -> RequestError:
    """The error for a value that is missing or has another type than the wanted one."""
    if value is None:
        return RequestError(
            f"{param} is missing; the request must have it", param=param, code="missing_field"
        )
    return RequestError(
        f"{param} is {show(value)}, but it must be {wanted}", param=param, code="invalid_type"
    )
