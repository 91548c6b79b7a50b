"""The bodies of `/v1/messages`: the message, its blocks, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....grammar.answer_report import GrammarReport, Truncated

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str = ""
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning. The signature is a digest, which is not checked when it comes back."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """The use of the generated tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts; `input_tokens` leaves out those that came from the prefix cache.

    `grammar` and `truncated`: for answers with a grammar.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    grammar: GrammarReport | UnsetType = UNSET
    truncated: Truncated | UnsetType = UNSET


class MessageBody(msgspec.Struct, kw_only=True):
    """The message in one piece, and at the beginning of a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    warnings: list[str] | UnsetType = UNSET


class CountBody(msgspec.Struct, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    input_tokens: int
    warnings: list[str] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, kw_only=True):
    """More of a block: `type` says which field is present. At the end of the message: why it ended, without `type`."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event of a stream; `type` says which of the other fields are present."""

    type: str
    message: MessageBody | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
