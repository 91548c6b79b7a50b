"""`checked_tool_schema`: the parameters of a strict tool, as they are compiled."""

from __future__ import annotations

from typing import Any

from ....grammar.backend import GrammarError
from ....grammar.schema.check import check_schema
from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError


class ToolSchemas:
    """Checks the schemas of strict tools under one server's limits."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits

    def __call__(self, schema: dict[str, Any], at: str) -> tuple[dict[str, Any], list[str]]:
        """The schema to compile, and warnings.

        Args:
            schema: of the arguments.
            at: the client's path of it.

        Raises:
            RequestError: it is no schema, or a keyword cannot be enforced.
        """
        try:
            report = check_schema(schema, strict=True, at=at, limits=self._limits)
        except GrammarError as error:
            raise RequestError(error.message, param=error.at or at, code=error.code) from None
        return (report.schema if isinstance(report.schema, dict) else {}), report.warnings
