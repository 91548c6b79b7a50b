"""Reasoning of an answer: how the options of a request change the prompt, and how many tokens it takes.

`reasoning_variables` are for the template, `reasoning_block` is the block at the prompt's end, and `ReasoningCounter`
counts for `usage`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ...runtime.grammar_use import ReasoningBlock
from .conversation import Conversation, ReasoningOptions
from .detection import AnswerFormats
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
    if effort is None and formats.reasoning is None and switch is None:
        asked = {"thinking": options.enabled, "thinking_token_budget": options.budget}
        warnings += [
            f"{name} has no effect: this model's template has no reasoning that can be turned on"
            for name, value in asked.items()
            if value
        ][:1]
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


class ReasoningCounter:
    """Counts the tokens inside the reasoning of one choice, without the tokens of its markers.

    A token is inside if it begins after the begin marker and before the end marker. Budgets count the same tokens.

    Attributes:
        count: so far. While a block is open, tokens of a begun end marker are in it, and those of a begun call.
    """

    __slots__ = (
        "_calls",
        "_count_at_call",
        "_family",
        "_inside",
        "_lengths",
        "_tail",
        "_token_bytes",
        "_waits",
        "count",
    )

    def __init__(
        self,
        family: ReasoningFamily | None,
        opened: bool,
        token_bytes: Callable[[int], bytes],
        calls: Sequence[bytes] = (),
    ) -> None:
        """Begin an answer.

        Args:
            family: of the model; None: it does not reason.
            opened: the prompt ends inside a block.
            token_bytes: `Tokenizer.token_bytes`.
            calls: as in `ReasoningBlock`.
        """
        self.count = 0
        self._calls = calls
        self._count_at_call: int | None = None  # in front of the last marker of a call
        self._family = family
        self._inside = opened and family is not None
        self._waits = family is not None and not opened  # for a begin marker
        self._token_bytes = token_bytes
        self._tail = b""  # the end of the text in which a marker may be complete with the next token
        self._lengths: deque[int] = deque()  # of the tokens in the tail

    def add(self, token_ids: Iterable[int]) -> None:
        """More tokens of the answer."""
        family = self._family
        if family is None:
            return
        for token_id in token_ids:
            if self._inside:
                self._add_inside(self._token_bytes(token_id), family)
            elif self._waits:
                self._add_outside(self._token_bytes(token_id), family)

    def end_by_call(self) -> None:
        """A call has begun: if a block is open, it ends in front of the call's marker."""
        if self._inside and self._count_at_call is not None:
            self.count = self._count_at_call
        self._inside = self._waits = False

    def _add_inside(self, data: bytes, family: ReasoningFamily) -> None:
        self.count += 1
        self._tail += data
        self._lengths.append(len(data))
        end = family.end.encode()
        index = self._tail.find(end)
        if index >= 0:
            self.count = self._count_before(index)
            self._inside = False
            self._waits = family.repeats
            self._clear()
            return
        for marker in self._calls:
            index = self._tail.rfind(marker)
            is_new = index + len(marker) > len(self._tail) - len(data)
            if index >= 0 and is_new and (marker == self._calls[0] or self._count_at_call is None):
                self._count_at_call = self._count_before(index)
        longest = max(map(len, (end, *self._calls)))
        while self._lengths and len(self._tail) - self._lengths[0] >= longest:
            self._tail = self._tail[self._lengths.popleft() :]

    def _count_before(self, index: int) -> int:
        """The count without the tokens that begin at or after an index of the tail."""
        position, count = len(self._tail), self.count
        for length in reversed(self._lengths):
            position -= length
            if position < index:
                break
            count -= 1
        return count

    def _add_outside(self, data: bytes, family: ReasoningFamily) -> None:
        begin = family.begin.encode()
        self._tail += data
        if begin in self._tail:
            self._inside = True
            self._waits = False
            self._clear()
        elif family.repeats:
            self._tail = self._tail[-len(begin) :]
        elif not begin.startswith(self._tail.lstrip()[: len(begin)]):
            self._waits = False  # the answer begins with something else

    def _clear(self) -> None:
        self._tail = b""
        self._lengths.clear()
