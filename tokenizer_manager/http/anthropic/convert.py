"""The Messages API: its blocks to a `Conversation`, and its settings to a request."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ....runtime.config.engine_config import EngineConfig
from ....runtime.sampling_defaults import SamplingDefaults
from ...conversation.conversation import (
    TEXT_SEPARATOR,
    ChoiceMode,
    Conversation,
    History,
    ReasoningOptions,
    Tool,
    ToolChoice,
)
from ...generation import Constraint, GenerationRequest, warm_up_of
from ..schema.constraints import json_schema
from ..schema.errors import renamed_fields
from ..schema.field_policy import NOTHING, PART_POLICY, RESULT_POLICY, Notes, policy_of
from ..schema.generation_fields import SamplingFields, at_least_one
from ..schema.image_parts import RequestImages
from ..schema.parts import (
    MEDIA_PARTS,
    left_out,
    part_text,
    reasoning_text,
    refuse_or_note,
    result_text,
    text_of,
)
from ..schema.values import (
    Body,
    check_limit,
    convert,
    effort_options,
    objects,
    one_of,
    refused,
    show,
)
from .wire import (
    COUNT_POLICY,
    MESSAGES_POLICY,
    NUMBERS,
    CountTokensRequest,
    MessagesRequest,
    Metadata,
    OutputConfig,
    ThinkingFields,
)

LENGTH_PARAM: Final = "max_tokens"
FORMAT_PARAM: Final = "output_config.format"
NAMES: Final = {
    "max_new_tokens": LENGTH_PARAM,
    "stop": "stop_sequences",
    "continue_final_message": "a last message of the assistant",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
_BLOCKS: Final = {
    "text": PART_POLICY,
    "thinking": policy_of(("thinking", "cache_control"), ("signature",)),
    "tool_use": policy_of(("id", "name", "input", "cache_control"), ("caller", "toolset_name")),
    "tool_result": policy_of(
        ("tool_use_id", "is_error", "cache_control"), ("toolset_name",), {"content": RESULT_POLICY}
    ),
}
_MESSAGE: Final = policy_of(("role", "content"))
_TOOL: Final = policy_of(
    ("name", "description", "input_schema", "strict", "cache_control"),
    ("allowed_callers", "defer_loading", "eager_input_streaming"),
)
_SESSION_SUFFIX: Final = re.compile(r"_session_([0-9a-fA-F-]{36})\Z")
_BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Begins a system block that a coding agent adds for Anthropic's accounting. It differs between requests, so that no
prompt would share a prefix with the one before it."""


def read_messages(
    body: Body, config: EngineConfig, defaults: SamplingDefaults, *, sees_images: bool = False
) -> tuple[MessagesRequest, GenerationRequest]:
    """Check a request of `/v1/messages`; `defaults`: for the sampling fields that it leaves out.

    Raises:
        RequestError: a field is refused; names its path.
    """
    strict = config.server.strict
    notes = Notes(MESSAGES_POLICY.check(body, strict=strict), strict=strict)
    request = convert(body, MessagesRequest)
    _note_edits(body, notes)
    conversation, constraint = _conversation(request, config, notes, sees_images=sees_images)
    fields = SamplingFields(stop=request.stop_sequences, **{name: getattr(request, name) for name in NUMBERS})
    with renamed_fields(NAMES):
        sampling = fields.sampling(
            config.limits,
            defaults,
            max_new_tokens=at_least_one(request.max_tokens or 1, LENGTH_PARAM),
            min_new_tokens=None,
            keep_stop=False,
        )
    generation = GenerationRequest(
        conversation=conversation,
        constraint=constraint,
        sampling=sampling,
        id_prefix="msg",
        prompt_param="messages",
        length_param=LENGTH_PARAM,
        cut_length=True,
        names=NAMES,
        warnings=notes.warnings,
    )
    return request, generation if request.max_tokens else warm_up_of(generation)


def user_of(request: MessagesRequest) -> tuple[str | None, str | None]:
    """The user of `metadata.user_id` and the session, which coding agents put there: a user has many sessions.

    They send a JSON object with `session_id`, or a text that ends with `_session_` and a UUID.

    Raises:
        RequestError: it is no text.
    """
    user_id = convert(request.metadata or {}, Metadata, "metadata").user_id
    if not user_id:
        return None, None
    try:
        parts = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        parts = None
    if not isinstance(parts, dict) or "session_id" not in parts:
        suffix = _SESSION_SUFFIX.search(user_id)
        return (user_id, None) if suffix is None else (user_id[: suffix.start()] or None, suffix[1])
    rest = {name: value for name, value in parts.items() if name != "session_id" and value not in NOTHING}
    session = parts["session_id"]
    user = msgspec.json.encode(rest, order="sorted").decode() if rest else None
    return user, session if isinstance(session, str) else None


def read_count(
    body: Body, config: EngineConfig, *, sees_images: bool = False
) -> tuple[CountTokensRequest, GenerationRequest]:
    """Check a request of `/v1/messages/count_tokens`.

    Raises:
        RequestError: a field is refused; names its path.
    """
    strict = config.server.strict
    notes = Notes(COUNT_POLICY.check(body, strict=strict), strict=strict)
    request = convert(body, CountTokensRequest)
    _note_edits(body, notes)
    conversation, _ = _conversation(request, config, notes, sees_images=sees_images)
    return request, GenerationRequest(
        conversation=conversation, prompt_param="messages", names=NAMES, warnings=notes.warnings
    )


def _note_edits(body: Body, notes: Notes) -> None:
    """Warn of edits of the context, which are not made; an edit that keeps everything is none."""
    management = body.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else management
    if not isinstance(edits, list):
        edits = [] if edits is None else [edits]
    if any(not isinstance(edit, dict) or edit.get("keep") != "all" for edit in edits):
        notes.warn("context_management has no effect: the whole conversation is the prompt")


def _conversation(
    request: CountTokensRequest, config: EngineConfig, notes: Notes, *, sees_images: bool
) -> tuple[Conversation, Constraint | None]:
    if not request.messages:
        raise refused("messages", "is empty; a chat has at least one message", "empty_prompt")
    check_limit("messages", len(request.messages), "messages", config.limits.max_messages, "max_messages")
    history = History()
    if request.system is not None:
        system = _system(request.system)
        if system:
            history.system(system)
    images = RequestImages(config.limits) if sees_images else None
    for at, message in objects(request.messages, "messages"):
        _read_message(message, at, history, notes, images)
    output = convert(request.output_config or {}, OutputConfig, "output_config")
    constraint = None if output.format is None else _format(output.format, config)
    if constraint is not None:
        notes.warn(*constraint.warnings)
    conversation = Conversation(
        messages=history.messages,
        tools=_tools(request.tools or [], notes),
        tool_choice=_tool_choice(request.tool_choice),
        tool_path="tools[{}]",
        schema_field="input_schema",
        spec=None if constraint is None else constraint.use.spec,
        reasoning=_reasoning(request.thinking, output.effort),
        continue_final_message=_continues(history, len(request.messages) - 1),
    )
    return conversation, constraint


# ---------------------------------------------------------------- messages


def _system(value: str | list[dict[str, Any]]) -> str:
    if isinstance(value, str):
        return value
    return TEXT_SEPARATOR.join(
        text
        for at, block in objects(value, "system")
        if not (text := text_of([block], at)).startswith(_BILLING_HEADER)
    )


def _read_message(
    message: Body, at: str, history: History, notes: Notes, images: RequestImages | None
) -> None:
    notes.check(_MESSAGE, message, at)
    role = one_of(message.get("role"), ("user", "assistant", "system"), f"{at}.role")
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif not isinstance(content, list):
        raise refused(
            f"{at}.content",
            f"is {show(content)}, but it must be a string or a list of blocks",
            "invalid_type",
        )
    for place, block in objects(content, f"{at}.content"):
        if role == "user" and images is not None and (image := images.anthropic_block(block, place, notes)):
            history.user([image])
        else:
            _read_block(block, role, place, history, notes)


def _read_block(block: Body, role: str, at: str, history: History, notes: Notes) -> None:
    kind = block.get("type")
    if isinstance(kind, str) and kind in _BLOCKS:
        notes.check(_BLOCKS[kind], block, at)
    if (text := part_text(block, at)) is not None:
        {"user": history.user, "assistant": history.assistant, "system": history.system}[role](text)
        return
    match role, kind:
        case "assistant", "thinking" | "reasoning":
            if text := reasoning_text(block, at):
                history.reasoning(text)
        case "assistant", "tool_use":
            arguments = convert(block.get("input") or {}, dict[str, Any], f"{at}.input")
            history.call(
                _text(block, "id", at), _text(block, "name", at), json.dumps(arguments, ensure_ascii=False)
            )
        case "user", "tool_result":
            call_id = _text(block, "tool_use_id", at)
            text = result_text(block.get("content"), f"{at}.content", notes)
            if block.get("is_error") is True:
                text = f"Error: {text}"
            if history.name_of(call_id) is None:
                raise refused(
                    f"{at}.tool_use_id",
                    f"is {show(call_id)}, but no tool_use block before it has this id; send the assistant's message "
                    "with the call, too",
                )
            history.result(call_id, text)
        case "user", "tool_use" | "thinking":
            refuse_or_note(block, at, None)
        case "user", str() if kind not in MEDIA_PARTS:
            left_out(kind, at, notes)
        case _:
            refuse_or_note(block, at, notes if role == "assistant" else None)


def _continues(history: History, index: int) -> bool:
    """Whether the last message is the beginning of the answer."""
    if not history.messages:
        raise refused("messages", "has no text; a chat has at least one message", "empty_prompt")
    last = history.messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise refused(f"messages[{index}]", "ends with tool_use, but there is no tool_result for it; add one")
    return bool(last["content"])


def _text(block: Body, key: str, at: str) -> str:
    if key not in block:
        raise refused(f"{at}.{key}", "is missing; the block must have it", "missing_field")
    return convert(block[key], str, f"{at}.{key}")


# ---------------------------------------------------------------- tools and settings


def _tools(tools: list[dict[str, Any]], notes: Notes) -> tuple[Tool, ...]:
    """The tools with a schema; those that Anthropic defines or runs are left out with a warning."""
    kept: list[Tool] = []
    for at, tool in objects(tools, "tools"):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            notes.warn(f"{at} ({show(kind)}) was left out: this server knows only tools with input_schema")
            continue
        notes.check(_TOOL, tool, at)
        if "input_schema" not in tool:
            raise refused(f"{at}.input_schema", "is missing; the tool must have it", "missing_field")
        kept.append(
            Tool(
                name=_text(tool, "name", at),
                description=convert(tool.get("description") or "", str, f"{at}.description"),
                parameters=convert(tool["input_schema"], dict[str, Any], f"{at}.input_schema"),
                strict=convert(tool.get("strict") or False, bool, f"{at}.strict"),
            )
        )
    return tuple(kept)


_MODES: Final = {
    "auto": ChoiceMode.AUTO,
    "any": ChoiceMode.REQUIRED,
    "tool": ChoiceMode.NAMED,
    "none": ChoiceMode.NONE,
}


def _tool_choice(choice: dict[str, Any] | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    mode = _MODES[one_of(choice.get("type"), tuple(_MODES), "tool_choice.type")]
    name = _text(choice, "name", "tool_choice") if mode is ChoiceMode.NAMED else ""
    return ToolChoice(mode=mode, name=name, parallel=choice.get("disable_parallel_tool_use") is not True)


def _format(form: dict[str, Any], config: EngineConfig) -> Constraint:
    one_of(form.get("type"), ("json_schema",), f"{FORMAT_PARAM}.type")
    return json_schema(form.get("schema"), FORMAT_PARAM, f"{FORMAT_PARAM}.schema", config, strict=False)


def _reasoning(thinking: dict[str, Any] | None, effort: str | None) -> ReasoningOptions:
    options = effort_options(effort, "output_config.effort")
    if thinking is None:
        return options
    fields = convert(thinking, ThinkingFields, "thinking")
    kind = one_of(fields.type, ("enabled", "adaptive", "between_tools", "disabled"), "thinking.type")
    if kind == "disabled":
        return replace(options, enabled=False)
    if kind == "enabled" and fields.budget_tokens is None:
        raise refused("thinking.budget_tokens", "is missing; enabled thinking must have it", "missing_field")
    budget = at_least_one(fields.budget_tokens, "thinking.budget_tokens")
    return replace(options, enabled=True, budget=budget, include=fields.display != "omitted")
