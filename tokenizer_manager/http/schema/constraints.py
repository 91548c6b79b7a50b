"""`constraint_of`: from the fields of a request to what the answer is constrained to, or errors with the client's path.

Everything that can be found without compiling is found here, in microseconds to milliseconds; a large body is built off
the event loop, with this in it. Errors of the compiler come later, under `Constraint.param`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from ....grammar.backend import GrammarError
from ....grammar.lowering.simple import (
    ANY_OBJECT,
    choice_spec,
    grammar_spec,
    regex_spec,
    regex_text,
    schema_spec,
)
from ....grammar.lowering.structural_tags import StructuralTags
from ....grammar.schema.check import check_schema
from ....grammar.schema.report import Finding
from ....grammar.schema.size import parse_schema
from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.config.answer_config import AnswerConfig
from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, Whitespace
from .constraint_fields import ConstraintFields
from .field_policy import NOTHING, first_warnings
from .json_body import show, without_nulls

_FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
_STRUCTURED: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS: Final = (
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_fallback",
    "disable_additional_properties",
)


GRAMMAR_CODES: Final = frozenset(
    {
        "invalid_schema",
        "unsupported_schema",
        "unsatisfiable_schema",
        "invalid_regex",
        "invalid_grammar",
        "schema_too_complex",
    }
)
"""Codes of errors about a constraint itself."""


class Constraint(NamedTuple):
    """What an answer is constrained to.

    Attributes:
        use: for the scheduler; without reasoning.
        param: the client's path of the constraint, for errors.
        warnings: for the response.
        shortest: a shortest answer, as compact JSON; None if it is not known.
        findings: of every keyword of a schema, if they were asked for.
    """

    use: GrammarUse
    param: str
    warnings: list[str]
    shortest: str | None = None
    findings: tuple[Finding, ...] = ()


class _Asked(NamedTuple):
    """One constraint of a request.

    Attributes:
        kind: json, json_object, regex, choice, grammar or structural_tag.
        strict: the client asks for exact enforcement.
    """

    kind: str
    value: Any
    param: str
    strict: bool = False


def constraint_of(
    fields: ConstraintFields,
    config: AnswerConfig,
    limits: RequestLimits,
    *,
    strict_server: bool,
    at: str = "",
    explain: bool = False,
) -> Constraint | None:
    """The constraint of a request; None for free text.

    Args:
        fields: of the request.
        config: the server's rule for whitespace.
        limits: on sizes.
        strict_server: warnings are errors.
        at: path of the object that has the fields, such as `sampling_params`.
        explain: collect the findings of a schema, of which those that `strict` would refuse are some.

    Raises:
        RequestError: two constraints, a wrong form, or a constraint that cannot be met; `param` is the client's path.
    """
    warnings: list[str] = []
    asked = _asked(fields, f"{at}." if at else "", warnings, strict=strict_server)
    if asked is None:
        return None
    with _as_request_errors(asked.param):
        whitespace, pattern = _whitespace(fields, config, f"{at}." if at else "", limits)
        made = _made(
            asked,
            whitespace,
            pattern,
            limits,
            strict=(asked.strict or strict_server) and not explain,
            explain=explain,
        )
        if strict_server and made.warnings:
            raise GrammarError(f"{made.warnings[0]} (the server runs with --strict)", "unsupported_schema")
    is_complete = fields.complete_json is not False and _is_json(made.use)
    return made._replace(
        use=replace(made.use, complete=is_complete), warnings=first_warnings(warnings + made.warnings)
    )


def _is_json(use: GrammarUse) -> bool:
    return use.spec is not None and use.spec.kind is GrammarKind.JSON_SCHEMA


def check_room(constraint: Constraint, max_tokens: int | None, param: str, tokenizer: Tokenizer) -> None:
    """Refuse a limit on the answer's length below its shortest answer.

    Args:
        constraint: of the request.
        max_tokens: the limit.
        param: the client's name of the limit.
        tokenizer: of the model.

    Raises:
        RequestError: the answer would be cut off in any case.
    """
    if constraint.shortest is None or max_tokens is None or len(constraint.shortest.encode()) <= max_tokens:
        return  # a token has at least one byte
    count = len(tokenizer.encode(constraint.shortest, add_special_tokens=False))
    if count > max_tokens:
        raise RequestError(
            f"the shortest answer to {constraint.param} has {count} tokens, but {param} is {max_tokens}; raise it",
            param=param,
            code="max_tokens_too_small",
        )


# ---------------------------------------------------------------- which constraint


def _asked(fields: ConstraintFields, prefix: str, warnings: list[str], *, strict: bool) -> _Asked | None:
    found: list[_Asked] = []
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
            found.append(_Asked(kind, value, prefix + name))
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
) -> _Asked | None:
    value = without_nulls(value)
    kind = value.get("type")
    if kind not in _FORMATS:
        raise RequestError(
            f"{param}.type is {show(kind)}, but it must be one of {', '.join(_FORMATS)}",
            param=f"{param}.type",
            code="missing_field" if kind is None else "invalid_value",
        )
    if kind == "structural_tag":
        return _Asked(kind, value, param)
    nested = value.get("json_schema")
    _check_names(
        value, ("type", "json_schema", "schema", "name", "strict", "description"), param, warnings, strict
    )
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("schema") is not None:  # llama.cpp's spelling of json_schema
            return _Asked("json", value["schema"], f"{param}.schema", _flag(value, "strict", param))
        return _Asked("json_object", None, param)
    if nested is None and value.get("schema") is not None:  # flat, as in /v1/responses
        nested, inner = value, param
    else:
        inner = f"{param}.json_schema"
        if not isinstance(nested, dict):
            raise _missing(nested, inner, "an object with a schema")
        nested = without_nulls(nested)
        _check_names(nested, ("name", "schema", "strict", "description"), inner, warnings, strict)
    if nested.get("schema") is None:
        raise _missing(None, f"{inner}.schema", "a JSON Schema")
    return _Asked("json", nested["schema"], f"{inner}.schema", _flag(nested, "strict", inner))


def _of_structured_outputs(
    value: dict[str, Any], param: str, warnings: list[str], *, strict: bool
) -> Iterator[_Asked]:
    value = without_nulls(value)
    _check_names(value, (*_STRUCTURED, *_OPTIONS), param, warnings, strict)
    if _flag(value, "disable_additional_properties", param):
        name = f"{param}.disable_additional_properties"
        raise RequestError(
            f"{name} is not supported; set additionalProperties to false in the schema",
            param=name,
            code="unsupported_field",
        )
    for kind in _STRUCTURED:
        inner = value.get(kind)
        path = f"{param}.{kind}"
        if kind == "json_object":
            if _flag(value, kind, param):
                yield _Asked(kind, None, path)
        elif inner not in NOTHING:
            wanted = {
                "json": (dict | str | bool, "a JSON Schema, as an object or a string"),
                "structural_tag": (dict | str, "an object or a string with JSON"),
                "choice": (list, "a list of strings"),
            }.get(kind, (str, "a string"))
            if not isinstance(inner, wanted[0]) or (
                kind == "choice" and not all(isinstance(c, str) for c in inner)
            ):
                raise _missing(inner, path, wanted[1])
            yield _Asked(kind, inner, path)


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


def _flag(value: dict[str, Any], name: str, param: str) -> bool:
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise _missing(flag, f"{param}.{name}", "true or false")
    return bool(flag)


def _missing(value: object, param: str, wanted: str) -> RequestError:
    if value is None:
        return RequestError(
            f"{param} is missing; the request must have it", param=param, code="missing_field"
        )
    return RequestError(
        f"{param} is {show(value)}, but it must be {wanted}", param=param, code="invalid_type"
    )


# ---------------------------------------------------------------- what it means


def _made(
    asked: _Asked,
    whitespace: Whitespace,
    pattern: str,
    limits: RequestLimits,
    *,
    strict: bool,
    explain: bool,
) -> Constraint:
    kind, value, param, _ = asked
    match kind:
        case "json":
            schema = parse_schema(value, param, limits) if isinstance(value, str) else value
            report = check_schema(schema, strict=strict, at=param, limits=limits, explain=explain)
            return Constraint(
                GrammarUse(spec=schema_spec(report, whitespace, pattern)),
                param,
                report.warnings,
                report.compact_sample,
                tuple(report.findings),
            )
        case "json_object":
            spec = GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT, whitespace, pattern)
            return Constraint(GrammarUse(spec=spec), param, [], "{}")
        case "regex":
            return Constraint(GrammarUse(spec=regex_spec(value, param, limits)), param, [])
        case "choice":
            shortest = min(value, key=len, default=None)
            return Constraint(GrammarUse(spec=choice_spec(value, param)), param, [], shortest)
        case "grammar":
            return Constraint(GrammarUse(spec=grammar_spec(value, param, limits)), param, [])
        case _:
            tag = _parsed_tag(value, param, limits)
            reader = StructuralTags(
                param, strict=strict, limits=limits, whitespace=whitespace, whitespace_pattern=pattern
            )
            return Constraint(reader.use(tag), param, reader.warnings)


def _parsed_tag(value: Any, param: str, limits: RequestLimits) -> dict[str, Any]:
    tag = parse_schema(value, param, limits) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise GrammarError(f"{param}: it must be an object", "invalid_grammar", param)
    return tag


def _whitespace(
    fields: ConstraintFields, config: AnswerConfig, prefix: str, limits: RequestLimits
) -> tuple[Whitespace, str]:
    options = fields.structured_outputs or {}
    whitespace = config.whitespace
    if _flag(options, "disable_any_whitespace", f"{prefix}structured_outputs"):
        whitespace = Whitespace.COMPACT
    for value, param in (
        (fields.whitespace_pattern, f"{prefix}whitespace_pattern"),
        (fields.guided_whitespace_pattern, f"{prefix}guided_whitespace_pattern"),
        (options.get("whitespace_pattern"), f"{prefix}structured_outputs.whitespace_pattern"),
    ):
        if value is not None:
            if not isinstance(value, str):
                raise _missing(value, param, "a string")
            if not value:
                return Whitespace.COMPACT, ""
            return whitespace, regex_text(value, param, limits)
    return whitespace, ""


@contextlib.contextmanager
def _as_request_errors(param: str) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        raise RequestError(error.message, param=error.at or param, code=error.code) from None
