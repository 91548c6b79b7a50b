"""From the bodies of chat requests to a `Conversation`."""

from __future__ import annotations

from typing import Any, Final

from ....runtime.errors import RequestError
from ....runtime.grammar_use import GrammarSpec
from ....runtime.sampling_params import MAX_COUNT
from ...conversation.conversation import ChoiceMode, Conversation, ReasoningOptions, Tool, ToolChoice
from .json_body import Body, show
from .protocol import ChatRequest, PinRequest, TokenizeRequest, checked_template_variables
from .tools import choice_of, function_choice_of, function_of, tools_of

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_conversation(
    request: ChatRequest, messages: list[dict[str, Any]], spec: GrammarSpec | None
) -> Conversation:
    """The conversation of a chat completion.

    Args:
        request: the body.
        messages: checked, from `template_messages`.
        spec: what the answer is constrained to.

    Raises:
        RequestError: tools, choice or options are invalid.
    """
    tools, choice = tools_and_choice(request)
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; send one of them",
            param="continue_final_message",
            code="invalid_value",
        )
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        tool_path="functions[{}]" if request.functions else "tools[{}].function",
        spec=spec,
        reasoning=reasoning_options(request),
        variables=checked_template_variables(request.chat_template_kwargs),
        documents=tuple(request.documents or ()),
        continue_final_message=bool(request.continue_final_message),
        add_generation_prompt=request.add_generation_prompt is not False,
    )


def rendered_conversation(
    request: TokenizeRequest | PinRequest, messages: list[dict[str, Any]], *, add_generation_prompt: bool
) -> Conversation:
    """The conversation of a request that is only rendered.

    Raises:
        RequestError: a tool is invalid.
    """
    return Conversation(
        messages=messages,
        tools=tools_of(request.tools or (), "tools"),
        variables=checked_template_variables(request.chat_template_kwargs),
        add_generation_prompt=add_generation_prompt,
    )


def tools_and_choice(request: ChatRequest) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools of a request and the choice among them; the old `functions` are tools.

    Raises:
        RequestError: they are invalid, or given in both forms.
    """
    old = bool(request.functions) or request.function_call not in (None, "")
    if old and (request.tools or request.tool_choice not in (None, "")):
        raise RequestError(
            "functions and function_call are the old form of tools and tool_choice; send only one form",
            param="functions",
            code="invalid_value",
        )
    if old:
        functions = request.functions or ()
        tools = tuple(function_of(each, f"functions[{i}]") for i, each in enumerate(functions))
        return tools, function_choice_of(request.function_call)
    tools = tools_of(request.tools or (), "tools")
    choice = choice_of(request.tool_choice, request.parallel_tool_calls)
    if choice.mode is ChoiceMode.AUTO and not tools:
        choice = ToolChoice(mode=ChoiceMode.NONE)
    return tools, choice


def reasoning_options(request: ChatRequest) -> ReasoningOptions:
    """What a request says about reasoning, in the spellings of several APIs.

    Raises:
        RequestError: a value is invalid, or two spellings disagree.
    """
    thinking, reasoning = request.thinking or {}, request.reasoning or {}
    efforts: dict[str, object] = {
        "reasoning_effort": request.reasoning_effort or None,
        "reasoning.effort": reasoning.get("effort") or None,
    }
    budgets: dict[str, object] = {
        "thinking_token_budget": request.thinking_token_budget,
        "thinking.budget_tokens": thinking.get("budget_tokens"),
        "reasoning.max_tokens": reasoning.get("max_tokens"),
    }
    enabled = None
    kind = thinking.get("type") or None
    if kind is not None:
        if kind not in ("enabled", "adaptive", "disabled"):
            raise RequestError(
                f"thinking.type is {show(kind)}, but it must be enabled, adaptive or disabled",
                param="thinking.type",
                code="invalid_value",
            )
        enabled = None if kind == "adaptive" else kind == "enabled"
    return ReasoningOptions(
        enabled=enabled,
        effort=checked_effort(*_only(efforts)),
        budget=checked_budget(*_only(budgets)),
        include=request.include_reasoning is not False,
        separate=request.separate_reasoning is not False,
        stream=request.stream_reasoning is not False,
    )


def checked_effort(param: str, value: object) -> str | None:
    """An effort, or None.

    Raises:
        RequestError: it is none of `EFFORTS`.
    """
    if value is not None and value not in EFFORTS:
        raise RequestError(
            f"{param} is {show(value)}, but it must be one of {', '.join(EFFORTS)}",
            param=param,
            code="invalid_value",
        )
    return None if value is None else str(value)


def checked_budget(param: str, value: object) -> int | None:
    """A number of tokens, or None.

    Raises:
        RequestError: it is no integer in [0, MAX_COUNT].
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise RequestError(
            f"{param} is {show(value)}, but it must be a number of tokens, from 0 to {MAX_COUNT}",
            param=param,
            code="invalid_value",
        )
    return value


def _only(values: Body) -> tuple[str, object]:
    """The one that is set, with its name; the first one for none."""
    given = [(name, value) for name, value in values.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise RequestError(
                f"{given[0][0]} is {show(given[0][1])} and {name} is {show(value)}, but they mean the same; send one",
                param=name,
                code="invalid_value",
            )
    return given[0] if given else next(iter(values.items()))
