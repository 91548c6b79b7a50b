"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, the events, and the fate of other fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....grammar.answer_report import GrammarReport, Truncated
from ..schema.cache_fields import CacheControl
from ..schema.field_policy import PART_POLICY, FieldPolicy, NotYet, policy_of
from ..schema.field_types import OVERRIDES, Count, CountOrNone, Salt, StopString, number_fields
from ..schema.kv_hints import KvHints

_MESSAGE: Final = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"type": "string"},
    },
    "required": ["role", "content"],
}
MessageList = Annotated[
    list[dict[str, Any]],
    Meta(
        description="Contents are texts or lists of blocks.",
        extra_json_schema={OVERRIDES: {"minItems": 1, "items": _MESSAGE}},
    ),
]
System = Annotated[str | list[dict[str, Any]] | None, Meta(description="A text, or a list of text blocks.")]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`: what the prompt is made from."""

    messages: MessageList
    model: str | None = None
    system: System = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


NUMBERS: Final = ("temperature", "top_p", "top_k")
"""The sampling parameters that this API has, besides stop sequences."""

if TYPE_CHECKING:
    _Numbers = CountTokensRequest
else:
    _Numbers = msgspec.defstruct(
        "_Numbers", number_fields(only=NUMBERS), bases=(CountTokensRequest,), kw_only=True
    )


class DiagnosticsFields(msgspec.Struct, kw_only=True):
    """`diagnostics`: asks why the prompt of an earlier message was not found in the prefix cache."""

    previous_message_id: str | None = None


class MessagesRequest(_Numbers, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: CountOrNone
    stop_sequences: list[StopString] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    session_id: Salt | None = None
    kv_hints: KvHints | None = None
    cache_control: CacheControl | None = None
    diagnostics: DiagnosticsFields | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """`metadata`; the user is the tenant of the request."""

    user_id: str | None = None


class ThinkingFields(msgspec.Struct, kw_only=True):
    """`thinking`."""

    type: str
    budget_tokens: Count | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


_NOT_YET: Final[NotYet] = {
    "container": (),
    "mcp_servers": (),
    "output_format": (),  # an early name of `output_config.format`
}
_NO_EFFECT: Final = {
    "context_management",  # with a warning where it is an edit, see reading.py
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
}
_NESTED: Final = {
    "thinking": FieldPolicy(ThinkingFields, {}, no_effect=()),
    "output_config": FieldPolicy(
        OutputConfig, {}, no_effect=(), nested={"format": policy_of(("name", "schema"))}
    ),
    "system": PART_POLICY,
    "tool_choice": policy_of(("name", "disable_parallel_tool_use")),
}

MESSAGES_POLICY: Final = FieldPolicy(
    MessagesRequest,
    _NOT_YET,
    no_effect=_NO_EFFECT - {"metadata"},
    nested=_NESTED
    | {
        "cache_control": FieldPolicy(CacheControl, {}, no_effect=()),
        "diagnostics": FieldPolicy(DiagnosticsFields, {}, no_effect=()),
        "metadata": FieldPolicy(Metadata, {}, no_effect=()),
    },
)
COUNT_POLICY: Final = FieldPolicy(
    CountTokensRequest,
    _NOT_YET,
    no_effect=_NO_EFFECT
    | {
        "cache_control",
        "diagnostics",
        "kv_hints",
        "max_tokens",
        "session_id",
        "stop_sequences",
        "stream",
        *NUMBERS,
    },  # clients send whole requests
    nested=_NESTED,
)


StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str = ""


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


class CacheCreation(msgspec.Struct):
    """The tokens of `cache_creation_input_tokens` by the time for which they are kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts; `input_tokens` leaves out those that came from the prefix cache, and in a request with a breakpoint
    those that go into it.

    `grammar` and `truncated`: for answers with a grammar.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation | UnsetType = UNSET
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    grammar: GrammarReport | UnsetType = UNSET
    truncated: Truncated | UnsetType = UNSET


class CacheMissReason(msgspec.Struct):
    """The part that differs from the prompt of the earlier message, and its tokens that were not cached."""

    type: str
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(msgspec.Struct):
    """`diagnostics` of a message."""

    cache_miss_reason: CacheMissReason


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
    diagnostics: Diagnostics | UnsetType | None = UNSET
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
