"""The requests of `/v1/messages` and `/v1/messages/count_tokens` as structs, and the fate of their other fields."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ..schema.field_policy import FieldPolicy, NotYet
from ..schema.field_types import OVERRIDES, Count, Share, StopString, Temperature, TopK

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


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Count
    stop_sequences: list[StopString] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None


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
    "cache_control",
    "context_management",  # with a warning where it is an edit, see reading.py
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
}
_NESTED: Final = {
    "thinking": FieldPolicy(ThinkingFields, {}, no_effect=()),
    "output_config": FieldPolicy(OutputConfig, {}, no_effect={"task_budget"}),
}

MESSAGES_POLICY: Final = FieldPolicy(
    MessagesRequest, _NOT_YET, no_effect=_NO_EFFECT - {"metadata"}, nested=_NESTED
)
COUNT_POLICY: Final = FieldPolicy(
    CountTokensRequest,
    _NOT_YET,
    no_effect=_NO_EFFECT
    | {
        "max_tokens",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
    },  # clients send whole requests
    nested=_NESTED,
)
