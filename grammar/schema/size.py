"""`check_size`: limits on a schema that hold before anything else is done with it."""

from __future__ import annotations

import json
from typing import Any, Final

from ...runtime.config.request_limits import RequestLimits
from .report import SchemaError

MAX_DEPTH: Final = 200
"""Beyond `max_json_depth` too: the library's compiler is recursive."""


def parse_schema(text: str, at: str, limits: RequestLimits) -> Any:
    """A schema that the client sends as a string.

    Raises:
        SchemaError: no JSON, or too large.
    """
    _check_bytes(len(text.encode("utf-8", "surrogatepass")), at, limits)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(at, limits) from None
    except ValueError as error:
        raise SchemaError("invalid_schema", at, f"it is not valid JSON: {error}") from None


def check_size(schema: Any, at: str, limits: RequestLimits) -> None:
    """Check depth, number of values and bytes; level by level, so that the stack does not grow.

    Raises:
        SchemaError: a limit is exceeded.
    """
    level: list[Any] = [schema]
    count = size = 0
    most_bytes = limits.max_schema_kb << 10
    for _ in range(min(limits.max_json_depth, MAX_DEPTH) + 1):
        count += len(level)
        if count > limits.max_json_items:
            raise SchemaError(
                "schema_too_complex",
                at,
                f"the schema has more than {limits.max_json_items:,} values, which is the limit; send a smaller one, "
                f"or raise --max-json-items",
            )
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                size += _key_chars(value) + 4 * len(value)
                inner += value.values()
            elif isinstance(value, list | tuple):
                size += 2 + len(value)
                inner += value
            else:
                size += len(value) + 2 if isinstance(value, str) else 4
        _check_bytes(size, at, limits, most_bytes)
        if not inner:
            return
        level = inner
    raise _too_deep(at, limits)


def _key_chars(value: dict[Any, Any]) -> int:
    try:
        return sum(map(len, value))
    except TypeError:  # a key that is no string is refused later
        return sum(len(key) for key in value if isinstance(key, str))


def _check_bytes(size: int, at: str, limits: RequestLimits, most: int | None = None) -> None:
    if size > (limits.max_schema_kb << 10 if most is None else most):
        raise SchemaError(
            "schema_too_complex",
            at,
            f"the schema has {size:,} bytes or more, the limit is {limits.max_schema_kb << 10:,}; send a smaller one, "
            f"or raise --max-schema-kb",
        )


def _too_deep(at: str, limits: RequestLimits) -> SchemaError:
    most = min(limits.max_json_depth, MAX_DEPTH)
    return SchemaError(
        "schema_too_complex",
        at,
        f"the schema is nested more than {most} deep, which is the limit; move parts of it under $defs, or raise "
        f"--max-json-depth",
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
