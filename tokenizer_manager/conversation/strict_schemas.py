"""`strict_schemas`: checks the schemas of strict tools, for `Planner`."""

from __future__ import annotations

from typing import Any

from ...grammar.backend import GrammarError
from ...grammar.schema.check import check_schema
from ...runtime.config.request_limits import RequestLimits
from ...runtime.errors import RequestError
from .planner import CheckSchema


def strict_schemas(limits: RequestLimits) -> CheckSchema:
    """A check that refuses the keywords that cannot be enforced exactly.

    Args:
        limits: on the size of a schema.
    """

    def check(schema: dict[str, Any], at: str) -> tuple[dict[str, Any], list[str]]:
        try:
            report = check_schema(schema, strict=True, at=at, limits=limits)
        except GrammarError as error:
            raise RequestError(error.message, param=error.at or at, code=error.code) from None
        # An empty schema is `true`, but arguments are an object in any case.
        return report.schema if isinstance(report.schema, dict) else {"type": "object"}, report.warnings

    return check
