"""`constraint_of`: from the fields of a request to what the answer is constrained to, or errors with the client's path.

Everything that can be found without compiling is found here, in microseconds to milliseconds; a large body is built off
the event loop, with this in it. Errors of the compiler come later, under `Constraint.param`. `chat_grammar` joins a
constraint with the plan of a chat; `json_object` and `json_schema` are the formats of the agent APIs, read as the
`response_format` of chat completions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

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
from ....grammar.schema.check import check_schema, parse_schema
from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.config.answer_config import AnswerConfig, RequestLimits
from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import RequestError
from ....runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, Whitespace
from ...conversation.conversation import ChoiceMode, Conversation
from ...conversation.planner import AnswerPlan
from ...generation import Constraint
from .constraint_fields import Asked, ConstraintFields, asked_constraint, flag_of, unusable
from .field_policy import first_warnings
from .values import convert, refused

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


def constraint_of(
    fields: ConstraintFields,
    config: AnswerConfig,
    limits: RequestLimits,
    *,
    strict_server: bool,
    at: str = "",
    explain: bool = False,
    closed: bool = False,
) -> Constraint | None:
    """The constraint of a request; None for free text.

    Args:
        fields: of the request.
        config: the server's rule for whitespace.
        limits: on sizes.
        strict_server: warnings are errors.
        at: path of the object that has the fields, such as `sampling_params`.
        explain: collect the findings of a schema, of which those that `strict` would refuse are some.
        closed: objects of a schema have only the properties that it lists; see `check_schema`.

    Raises:
        RequestError: two constraints, a wrong form, or a constraint that cannot be met; `param` is the client's path.
    """
    warnings: list[str] = []
    asked = asked_constraint(fields, f"{at}." if at else "", warnings, strict=strict_server)
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
            closed=closed or config.json_closed_objects or _is_closed(fields, at),
        )
        if strict_server and made.warnings:
            raise GrammarError(f"{made.warnings[0]} (the server runs with --strict)", "unsupported_schema")
    is_complete = fields.complete_json is not False and _is_json(made.use)
    return made._replace(
        use=replace(made.use, complete=is_complete, shortest=made.shortest or ""),
        warnings=first_warnings(warnings + made.warnings),
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


# ---------------------------------------------------------------- what it means


def _made(
    asked: Asked,
    whitespace: Whitespace,
    pattern: str,
    limits: RequestLimits,
    *,
    strict: bool,
    explain: bool,
    closed: bool,
) -> Constraint:
    kind, value, param, _ = asked
    match kind:
        case "json":
            schema = parse_schema(value, param, limits) if isinstance(value, str) else value
            report = check_schema(
                schema, strict=strict, at=param, limits=limits, explain=explain, closed=closed
            )
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


def _is_closed(fields: ConstraintFields, at: str) -> bool:
    options, place = (
        fields.structured_outputs or {},
        f"{at}.structured_outputs" if at else "structured_outputs",
    )
    return flag_of(options, "disable_additional_properties", place)


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
    if flag_of(options, "disable_any_whitespace", f"{prefix}structured_outputs"):
        whitespace = Whitespace.COMPACT
    for value, param in (
        (fields.whitespace_pattern, f"{prefix}whitespace_pattern"),
        (fields.guided_whitespace_pattern, f"{prefix}guided_whitespace_pattern"),
        (options.get("whitespace_pattern"), f"{prefix}structured_outputs.whitespace_pattern"),
    ):
        if value is not None:
            if not isinstance(value, str):
                raise unusable(value, param, "a string")
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


def check_constraint_with_tools(conversation: Conversation, constraint: Constraint | None) -> None:
    """Refuse a constraint beside tools that exclude it; call it before the chat is planned.

    Raises:
        RequestError: the answer must be a call, or the constraint has triggers of its own (structural tags).
    """
    if constraint is None or not conversation.tools:
        return
    mode = conversation.tool_choice.mode
    if mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED):
        raise RequestError(
            f"{constraint.param} constrains the answer, but tool_choice demands a tool call; send one of them",
            param="tool_choice",
            code="conflicting_constraints",
        )
    if constraint.use.spec is None and mode is not ChoiceMode.NONE:
        raise RequestError(
            f"{constraint.param} and tools exclude each other; send one of them",
            param=constraint.param,
            code="conflicting_constraints",
        )


def chat_grammar(plan: AnswerPlan, constraint: Constraint | None) -> GrammarUse | None:
    """The grammars of the plan, or those of structural tags after the plan's reasoning block.

    A JSON answer is also complete if it ends by its limit of tokens, unless the request does not want that.
    """
    use = plan.grammar
    if constraint is None:
        return use
    if constraint.use.spec is None:
        return replace(constraint.use, reasoning=plan.reasoning)
    if use is None or use.spec != constraint.use.spec:
        return use
    return replace(use, complete=constraint.use.complete, shortest=constraint.use.shortest)


_SCHEMA_PATH: Final = "response_format.json_schema.schema"
_FIELD_PATH: Final = "response_format"


def json_object(at: str, config: EngineConfig, fields: ConstraintFields | None = None) -> Constraint:
    """Any JSON object.

    Args:
        at: path of the field.
        config: whitespace.
        fields: of the request, for its options: whitespace, completion. None: the API has none.
    """
    return _read({"type": "json_object"}, at, at, config, fields)


def json_schema(
    schema: object,
    at: str,
    schema_at: str,
    config: EngineConfig,
    *,
    strict: bool,
    fields: ConstraintFields | None = None,
) -> Constraint:
    """Values of a JSON Schema.

    Args:
        schema: an object.
        at: path of the field that has the format.
        schema_at: path of the schema.
        config: whitespace.
        strict: refuse what cannot be enforced.
        fields: see `json_object`.

    Raises:
        RequestError: it is missing, is no schema, or cannot be enforced.
    """
    if schema is None:
        raise refused(schema_at, "is missing; the format must have it", "missing_field")
    inner = {"name": "answer", "schema": convert(schema, dict[str, Any], schema_at), "strict": strict}
    return _read({"type": "json_schema", "json_schema": inner}, at, schema_at, config, fields)


def _read(
    form: dict[str, Any], at: str, schema_at: str, config: EngineConfig, fields: ConstraintFields | None
) -> Constraint:
    options = ConstraintFields() if fields is None else fields
    with _renamed(at, schema_at):
        found = constraint_of(
            ConstraintFields(
                response_format=form,
                whitespace_pattern=options.whitespace_pattern,
                guided_whitespace_pattern=options.guided_whitespace_pattern,
                complete_json=options.complete_json,
            ),
            config.answers,
            config.limits,
            strict_server=config.server.strict,
        )
    assert found is not None
    return found._replace(
        param=_own(found.param, at, schema_at),
        warnings=[_own(warning, at, schema_at) for warning in found.warnings],
    )


@contextlib.contextmanager
def _renamed(at: str, schema_at: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        error.message = _own(error.message, at, schema_at)
        error.args = (error.message,)
        if error.param is not None:
            error.param = _own(error.param, at, schema_at)
        raise


def _own(text: str, at: str, schema_at: str) -> str:
    return text.replace(_SCHEMA_PATH, schema_at).replace(_FIELD_PATH, at)
