"""`constraint_of`: the constraint of a request, from the field that states it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ....runtime.config.answer_config import AnswerConfig
from ....runtime.errors import RequestError
from ....runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse
from .constraint_fields import ConstraintFields


class Constraint(NamedTuple):
    """What an answer is constrained to.

    Attributes:
        use: its grammars.
        param: the client's path of the constraint.
        warnings: for the client.
        shortest: a shortest answer; None if it is not known.
    """

    use: GrammarUse
    param: str
    warnings: list[str]
    shortest: str | None = None


def constraint_of(fields: ConstraintFields, config: AnswerConfig) -> Constraint | None:
    """Read the constraint of a request; None if it has none."""
    found: list[tuple[str, GrammarSpec]] = []

    def schema(param: str, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, text, config.whitespace, fields.whitespace_pattern or "")
        found.append((param, spec))

    form = fields.response_format
    if form is not None and form.get("type") == "json_object":
        schema("response_format", {"type": "object"})
    elif form is not None and form.get("type") == "json_schema":
        schema("response_format.json_schema.schema", (form.get("json_schema") or {}).get("schema", {}))
    elif form is not None and form.get("type") != "text":
        raise RequestError("response_format.type is unknown", param="response_format", code="invalid_value")
    if fields.json_schema is not None:
        schema("json_schema", fields.json_schema)
    if fields.regex is not None:
        found.append(("regex", GrammarSpec(GrammarKind.REGEX, fields.regex)))
    if len(found) > 1:
        raise RequestError(
            f"{found[0][0]} and {found[1][0]} exclude each other; send one of them",
            param=found[1][0],
            code="conflicting_constraints",
        )
    if not found:
        return None
    param, spec = found[0]
    return Constraint(
        GrammarUse(spec=spec, complete=fields.complete_json and spec.kind is GrammarKind.JSON_SCHEMA),
        param,
        [],
    )
