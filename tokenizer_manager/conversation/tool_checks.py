"""`checked_tools`: refuses tools and tool choices that no answer can follow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from ...runtime.errors import RequestError
from .conversation import ChoiceMode, Tool, ToolChoice

_NAME: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


def checked_tools(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    at: str = "tools",
    choice_at: str = "tool_choice",
    schema_field: str = "parameters",
    max_tools: int = 512,
    max_schema_kb: int = 256,
) -> list[str]:
    """Check the tools of a request; warnings for the client.

    Args:
        tools: of the request.
        choice: of them.
        at: the field that has the tools, or with {} the field of one tool, for errors.
        choice_at: the field that has the choice.
        schema_field: the field of a tool that has its schema.
        max_tools: `--max-tools`.
        max_schema_kb: `--max-schema-kb`: of all tools together.

    Raises:
        RequestError: a rule is violated; `param` says where.
    """
    path = at if "{}" in at else f"{at}[{{}}]"
    at = path.partition("[")[0]
    if len(tools) > max_tools:
        raise _refused(f"{at} has {len(tools):,} tools, the limit is {max_tools:,}; send fewer", at)
    seen: dict[str, int] = {}
    num_bytes = 0
    for index, tool in enumerate(tools):
        place = path.format(index)
        if not _NAME.fullmatch(tool.name):
            raise _refused(
                f"{place}.name is {tool.name[:160]!r}, but it must match [A-Za-z0-9_.:-]{{1,128}}",
                f"{place}.name",
            )
        if tool.name in seen:
            raise _refused(
                f"{place}.name is {tool.name!r}, which is the name of {path.format(seen[tool.name])}, too; names must "
                f"be unique",
                f"{place}.name",
            )
        seen[tool.name] = index
        num_bytes += len(tool.description.encode("utf-8", "replace"))
        num_bytes += _checked_parameters(tool, f"{place}.{schema_field}")
        if num_bytes > max_schema_kb << 10:
            raise RequestError(
                f"the tools up to {place} have {num_bytes:,} bytes, the limit is {max_schema_kb:,} kB; shorten their "
                f"descriptions and schemas, or raise --max-schema-kb",
                param=at,
                code="schema_too_complex",
            )
    _check_choice(seen, choice, at, choice_at)
    return []


def _checked_parameters(tool: Tool, place: str) -> int:
    """Check that the parameters are a schema of an object; their size in bytes."""
    schema = tool.parameters
    if schema is None:
        return 0
    kind = schema.get("type", "object")
    if kind != "object":
        raise RequestError(
            f'{place}: type is {json.dumps(kind)[:80]}, but arguments are an object; use "type": "object"',
            param=place,
            code="invalid_schema",
        )
    for key, wanted in (("properties", dict), ("required", list)):
        if key in schema and not isinstance(schema[key], wanted):
            raise RequestError(
                f"{place}/{key}: expected {'an object' if wanted is dict else 'a list'}",
                param=place,
                code="invalid_schema",
            )
    try:
        return len(json.dumps(schema))
    except (RecursionError, ValueError):
        raise RequestError(
            f"{place}: the schema is nested too deeply", param=place, code="schema_too_complex"
        ) from None


def _check_choice(names: dict[str, int], choice: ToolChoice, at: str, choice_at: str) -> None:
    if choice.mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED) and not names:
        raise _refused(f"{choice_at} requires a call, but {at} is empty; send tools", choice_at)
    if choice.mode is ChoiceMode.NAMED and choice.name not in names:
        raise _refused(f"{choice_at} names the tool {choice.name[:160]!r}, which is not in {at}", choice_at)
    for name in choice.allowed or ():
        if name not in names:
            raise _refused(f"{choice_at} allows the tool {name[:160]!r}, which is not in {at}", choice_at)
    if choice.allowed is not None and not choice.allowed and choice.mode is ChoiceMode.REQUIRED:
        raise _refused(f"{choice_at} requires a call, but allows no tool", choice_at)


def _refused(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_tools")
