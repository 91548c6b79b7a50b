"""How a request's options of reasoning change the prompt: variables of the template, and the block at its end."""

from __future__ import annotations

from typing import Any, Final

from ...runtime.grammar_use import ReasoningBlock
from .conversation import Conversation, ReasoningOptions
from .formats import AnswerFormats
from .parsing.reasoning_families import ReasoningFamily

_NO_EFFORT: Final = "none"
_EFFORTS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that templates do not know, as the nearest one of low, medium and high."""


def reasoning_variables(
    formats: AnswerFormats, options: ReasoningOptions
) -> tuple[dict[str, Any], list[str]]:
    """The template's variables for the options of reasoning, and warnings for options without effect."""
    variables: dict[str, Any] = {}
    warnings: list[str] = []
    effort = options.effort
    if effort is not None and effort != _NO_EFFORT:
        if "reasoning_effort" in formats.variables:
            variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
        elif formats.reasoning is None:
            warnings.append(
                f"reasoning_effort {effort!r} has no effect: this model's template has no reasoning"
            )
        else:
            warnings.append(
                f"reasoning_effort {effort!r} only turns the reasoning on: this model's template has no efforts"
            )
    enabled, switch = _enabled(options), formats.reasoning_switch
    if switch is not None and enabled is not None:
        variables[switch] = enabled
    return variables, warnings


def reasoning_block(
    formats: AnswerFormats, conversation: Conversation, prompt: str
) -> tuple[str, ReasoningBlock | None]:
    """The prompt, with an empty block if reasoning is off and the template cannot say so; and the block."""
    family, options = formats.reasoning, conversation.reasoning
    if family is None:
        return prompt, None
    opened, closed = _state_of(family, conversation, prompt)
    is_off = _enabled(options) is False
    if is_off and opened:
        return prompt.rstrip() + family.empty_end, None
    if (
        is_off
        and not closed
        and formats.reasoning_switch is None
        and conversation.add_generation_prompt
        and not conversation.continue_final_message
    ):
        return prompt + family.begin + family.empty_end, None
    if closed or (is_off and not opened):
        return prompt, None
    block = ReasoningBlock(family.begin.encode(), family.end.encode(), opened, options.budget)
    return prompt, block


def _enabled(options: ReasoningOptions) -> bool | None:
    """Whether the request turns the reasoning on or off; None: neither."""
    if options.budget == 0:
        return False
    if options.enabled is None and options.effort is not None:
        return options.effort != _NO_EFFORT
    return options.enabled


def _state_of(family: ReasoningFamily, conversation: Conversation, prompt: str) -> tuple[bool, bool]:
    """Whether the prompt ends inside a block, and whether it ends with a complete one."""
    end = prompt.rstrip()
    if end.endswith(family.begin):
        return True, False
    if end.endswith(family.end) and not family.repeats:
        return False, True
    if conversation.continue_final_message and conversation.messages:
        content = conversation.messages[-1].get("content") or ""
        begin = content.rfind(family.begin)
        return begin > content.rfind(family.end), 0 <= begin < content.rfind(family.end)
    return False, False
