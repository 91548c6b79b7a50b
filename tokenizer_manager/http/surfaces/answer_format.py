"""The constraints of answers that the agent APIs can ask for: any JSON object, or a JSON Schema.

They are read as the `response_format` of chat completions; errors and warnings name the client's own path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import RequestError
from ..schema.constraint_fields import ConstraintFields
from ..schema.constraints import Constraint, constraint_of
from ..schema.json_body import convert
from .checks import refused

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
