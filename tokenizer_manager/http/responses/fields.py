"""The request of `/v1/responses` as a struct, and the fate of the fields that it does not have."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ..schema.field_policy import NO_EFFECT, SAMPLING_NOT_YET, FieldPolicy, NotYet
from ..schema.field_types import OVERRIDES, Count, CountOrNone, Priority, Salt, Seconds
from ..schema.generation_fields import SamplingFields

_MESSAGE: Final = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"type": "string"},
    },
    "required": ["role", "content"],
}
Input = Annotated[
    Any,
    Meta(
        description="A text, or a list of items: messages, calls, results of calls, reasoning.",
        extra_json_schema={
            OVERRIDES: {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "minItems": 1, "items": _MESSAGE},
                ]
            }
        },
    ),
]


class ResponsesRequest(SamplingFields, kw_only=True):
    """Body of `POST /v1/responses`: OpenAI's fields, and the sampling fields of the other endpoints."""

    input: Input
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, Meta(description="none, auto, required, or an object.")] = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    min_tokens: CountOrNone | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """`text`: the format of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningFields(msgspec.Struct, kw_only=True):
    """`reasoning`."""

    effort: str | None = None
    max_tokens: CountOrNone | None = None


_NOT_YET: Final[NotYet] = SAMPLING_NOT_YET | {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_NO_EFFECT: Final = (NO_EFFECT | {"client_metadata", "include", "max_tool_calls", "stream_options"}) - {
    "metadata",
    "parallel_tool_calls",
    "include_reasoning",
    "separate_reasoning",
    "stream_reasoning",
}

POLICY: Final = FieldPolicy(
    ResponsesRequest,
    _NOT_YET,
    no_effect=_NO_EFFECT,
    nested={
        "text": FieldPolicy(TextOptions, {}, no_effect=()),
        "reasoning": FieldPolicy(
            ReasoningFields, {}, no_effect={"summary", "generate_summary", "encrypted_content"}
        ),
    },
)
