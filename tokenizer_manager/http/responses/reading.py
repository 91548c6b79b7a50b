"""Reads a request of `/v1/responses`: its items as a `Conversation`, its tools, and its settings."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from ....runtime.config.engine_config import EngineConfig
from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.sampling_defaults import SamplingDefaults
from ....runtime.sampling_params import SamplingParams
from ...conversation.conversation import Conversation, ReasoningOptions, Tool
from ...conversation.parsing.emitter import CUSTOM_INPUT
from ..schema.constraints import Constraint, constraint_of
from ..schema.errors import renamed_fields
from ..schema.generation_fields import at_least_one
from ..schema.json_body import Body, convert, shortened, show
from ..schema.limits import check_limit
from ..schema.protocol import checked_template_variables
from ..schema.tools import choice_of, tool_of
from ..surfaces.answer_format import json_object, json_schema
from ..surfaces.checks import effort_options, objects, one_of, refused, text_of
from ..surfaces.history import History
from ..surfaces.notes import Notes, policy_of
from .fields import POLICY, ReasoningFields, ResponsesRequest, TextOptions

LENGTH_PARAM: Final = "max_output_tokens"
FORMAT_PARAM: Final = "text.format"
NAMES: Final = {"max_new_tokens": LENGTH_PARAM, "max_tokens": LENGTH_PARAM, "min_new_tokens": "min_tokens"}
_MAX_SHOWN: Final = 60
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = frozenset(
    {"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"}
)
_RUN_BY_SERVERS: Final = frozenset(
    {
        "code_interpreter_call",
        "computer_call",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Items of tools that the server of an earlier answer ran."""
_NO_EFFECT: Final = ("async", "caller", "encrypted_content", "id", "phase", "status")
_CALL: Final = policy_of(("call_id", "name", "namespace", "arguments"), _NO_EFFECT)
_OUTPUT: Final = policy_of(("call_id", "output"), (*_NO_EFFECT, "name", "namespace"))
_ITEMS: Final = {
    "message": policy_of(("role", "content"), _NO_EFFECT),
    "function_call": _CALL,
    "function_call_output": _OUTPUT,
    "custom_tool_call": policy_of(("call_id", "name", "namespace", "input"), _NO_EFFECT),
    "custom_tool_call_output": _OUTPUT,
    "reasoning": policy_of(("content", "summary"), _NO_EFFECT),
}


Namespaces = dict[str, tuple[str, str]]
"""Name of a tool as the model sees it -> its namespace, and its name there."""
_NAMESPACE_END: Final = "__"
"""Between the two, for the model."""


class ReadResponses(NamedTuple):
    """A checked request."""

    request: ResponsesRequest
    conversation: Conversation
    constraint: Constraint | None
    sampling: SamplingParams
    warnings: list[str]
    namespaces: Namespaces


def read_responses(
    body: Body, limits: RequestLimits, answers: EngineConfig, defaults: SamplingDefaults, *, strict: bool
) -> ReadResponses:
    """Check a request; `defaults`: for the sampling fields that it leaves out.

    Raises:
        RequestError: a field is refused; names its path.
    """
    notes = Notes(POLICY.check(body, strict=strict), strict=strict)
    request = convert(body, ResponsesRequest)
    if request.n not in (None, 1):
        raise refused(
            "n", f"is {request.n}, but a response has one answer; leave it out", "unsupported_value"
        )
    history = History()
    if request.instructions:
        history.system(request.instructions)
    _read_input(request.input, history, notes, limits)
    tools, namespaces = _tools(request.tools or [], notes)
    text = convert(request.text or {}, TextOptions, "text")
    if text.verbosity not in (None, "medium"):
        notes.warn("text.verbosity has no effect")
    constraint = _constraint(request, text, answers)
    if constraint is not None:
        notes.warn(*constraint.warnings)
    conversation = Conversation(
        messages=history.messages,
        tools=tools,
        tool_choice=choice_of(request.tool_choice, request.parallel_tool_calls),
        tool_path="tools[{}]",
        spec=None if constraint is None else constraint.use.spec,
        reasoning=_reasoning(request.reasoning),
        variables=checked_template_variables(request.chat_template_kwargs),
    )
    with renamed_fields(NAMES):
        sampling = request.sampling(
            limits,
            defaults,
            max_new_tokens=at_least_one(request.max_output_tokens, LENGTH_PARAM),
            min_new_tokens=request.min_tokens,
            keep_stop=False,
        )
    return ReadResponses(request, conversation, constraint, sampling, notes.warnings, namespaces)


# ---------------------------------------------------------------- input


def _read_input(value: object, history: History, notes: Notes, limits: RequestLimits) -> None:
    if isinstance(value, str):
        if not value:
            raise refused("input", "is empty; a chat has at least one message", "empty_prompt")
        history.user(value)
        return
    if not isinstance(value, list):
        raise refused(
            "input", f"is {show(value)}, but it must be a string or a list of items", "invalid_type"
        )
    if not value:
        raise refused("input", "is empty; a chat has at least one message", "empty_prompt")
    check_limit("input", len(value), "items", limits.max_messages, "max_messages")
    for at, item in objects(value, "input"):
        _read_item(item, at, history, notes)


def _read_item(item: Body, at: str, history: History, notes: Notes) -> None:
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in _ITEMS:
        notes.check(_ITEMS[kind], item, at)
    match kind:
        case "message":
            _read_message(item, at, history)
        case "function_call":
            history.call(_text(item, "call_id", at), _tool_name(item, at), _text(item, "arguments", at))
        case "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: _text(item, "input", at)}, ensure_ascii=False)
            history.call(_text(item, "call_id", at), _tool_name(item, at), arguments)
        case "function_call_output" | "custom_tool_call_output":
            history.result(
                _text(item, "call_id", at), text_of(item.get("output"), f"{at}.output", _TEXT_PARTS)
            )
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            text = text_of(parts, f"{at}.content" if item.get("content") else f"{at}.summary", _TEXT_PARTS)
            if text:
                history.reasoning(text)
        case str() if kind in _RUN_BY_SERVERS:
            notes.warn(f"{at} ({kind}) was left out: it belongs to a tool that this server does not run")
        case _:
            raise RequestError(
                f"{at}.type is {show(kind)}, which is not supported; send messages, function_call, "
                f"function_call_output, custom_tool_call, custom_tool_call_output or reasoning items",
                param=f"{at}.type",
                code="unsupported_value",
            )


def _read_message(item: Body, at: str, history: History) -> None:
    role = one_of(item.get("role"), _ROLES, f"{at}.role")
    text = text_of(item.get("content"), f"{at}.content", _TEXT_PARTS)
    match role:
        case "user":
            history.user(text)
        case "assistant":
            history.assistant(text)
        case _:
            history.system(text)


def _text(item: Body, key: str, at: str) -> str:
    if key not in item:
        raise refused(f"{at}.{key}", "is missing; the item must have it", "missing_field")
    return convert(item[key], str, f"{at}.{key}")


# ---------------------------------------------------------------- tools


def _tools(tools: list[dict[str, Any]], notes: Notes) -> tuple[tuple[Tool, ...], Namespaces]:
    """The tools that the client runs, those in namespaces too; others are left out with a warning."""
    kept: list[Tool] = []
    namespaces: Namespaces = {}
    for at, tool in objects(tools, "tools"):
        if tool.get("type") != "namespace":
            kept += _tool(tool, at, notes)
            continue
        namespace = _text(tool, "name", at)
        inner = convert(tool.get("tools") or [], list[dict[str, Any]], f"{at}.tools")
        for place, entry in objects(inner, f"{at}.tools"):
            for made in _tool(entry, place, notes):
                name = f"{namespace}{_NAMESPACE_END}{made.name}"
                namespaces[name] = (namespace, made.name)
                kept.append(replace(made, name=name))
    return tuple(kept), namespaces


def _tool(tool: Body, at: str, notes: Notes) -> list[Tool]:
    """A tool, or none with a warning."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind not in ("function", "custom"):
        notes.warn(f"{at} ({shortened(kind, _MAX_SHOWN)}) was left out: this server does not run tools")
        return []
    return [tool_of(tool, at)]


def _tool_name(call: Body, at: str) -> str:
    """The name of the tool of an earlier call, as the model sees it."""
    name = _text(call, "name", at)
    if call.get("namespace") is None:
        return name
    return f"{_text(call, 'namespace', at)}{_NAMESPACE_END}{name}"


# ---------------------------------------------------------------- settings


def _constraint(request: ResponsesRequest, text: TextOptions, config: EngineConfig) -> Constraint | None:
    """The constraint of `text.format`, or of a field of another engine."""
    own = None if text.format is None else _format(text.format, config, request)
    other = constraint_of(request, config.answers, config.limits, strict_server=config.server.strict)
    if own is not None and other is not None:
        raise RequestError(
            f"{own.param} and {other.param} exclude each other; send one of them",
            param=other.param,
            code="conflicting_constraints",
        )
    return own or other


def _format(form: dict[str, Any], config: EngineConfig, request: ResponsesRequest) -> Constraint | None:
    match one_of(form.get("type"), ("text", "json_object", "json_schema"), f"{FORMAT_PARAM}.type"):
        case "json_object":
            return json_object(FORMAT_PARAM, config, request)
        case "json_schema":
            return json_schema(
                form.get("schema"),
                FORMAT_PARAM,
                f"{FORMAT_PARAM}.schema",
                config,
                strict=form.get("strict") is True,
                fields=request,
            )
        case _:
            return None


def _reasoning(value: dict[str, Any] | None) -> ReasoningOptions:
    fields = convert(value or {}, ReasoningFields, "reasoning")
    return replace(effort_options(fields.effort, "reasoning.effort"), budget=fields.max_tokens)
