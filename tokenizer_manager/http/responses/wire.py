"""The bodies of `/v1/responses`, the events of its stream, and the fate of the fields that a request does not have."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....grammar.answer_report import GrammarReport, Truncated
from ..schema.cache_fields import BREAKPOINTS, CacheOptions
from ..schema.field_policy import (
    CACHE_OPTIONS_POLICY,
    CHOICE_POLICY,
    NO_EFFECT,
    SAMPLING_NOT_YET,
    TOOL_POLICY,
    FieldPolicy,
    NotYet,
    policy_of,
)
from ..schema.field_types import (
    OVERRIDES,
    AnswerLimit,
    CountOrNone,
    Priority,
    Retention,
    Salt,
    Seconds,
    ServiceTier,
)
from ..schema.generation_fields import BACKGROUND_POLICY, BackgroundOptions, SamplingFields
from ..schema.kv_hints import KvHints

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
    max_output_tokens: AnswerLimit = None
    min_tokens: CountOrNone | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_key: Salt | None = None
    prompt_cache_retention: Retention | None = None
    session_id: Salt | None = None
    kv_hints: KvHints | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None
    service_tier: ServiceTier | None = None
    background_options: BackgroundOptions | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """`text`: the format of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningFields(msgspec.Struct, kw_only=True):
    """`reasoning`."""

    effort: str | None = None
    max_tokens: CountOrNone | None = None


_NOT_YET: Final[NotYet] = SAMPLING_NOT_YET | {
    "context_management": (),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_NO_EFFECT: Final = (NO_EFFECT | {"client_metadata", "max_tool_calls", "stream_options"}) - {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "store",
    "parallel_tool_calls",
    "include_reasoning",
    "separate_reasoning",
    "stream_reasoning",
}

_TOOL_POLICY: Final = policy_of(
    ("name", "description", "parameters", "strict", "format", "function", "custom", *BREAKPOINTS),
    ("defer_loading",),
    {"tools": TOOL_POLICY},
    kinds=("function", "custom", "namespace", None),
)
POLICY: Final = FieldPolicy(
    ResponsesRequest,
    _NOT_YET,
    no_effect=_NO_EFFECT,
    nested={
        "text": FieldPolicy(
            TextOptions,
            {},
            no_effect=(),
            nested={"format": policy_of(("name", "description", "schema", "strict"))},
        ),
        "tools": _TOOL_POLICY,
        "prompt_cache_options": CACHE_OPTIONS_POLICY,
        "background_options": BACKGROUND_POLICY,
        "tool_choice": CHOICE_POLICY,
        "reasoning": FieldPolicy(
            ReasoningFields, {}, no_effect={"summary", "generate_summary", "encrypted_content"}
        ),
    },
)


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    """The text of a reasoning item."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Text of the answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning before the answer."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomToolCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputDetails(msgspec.Struct):
    """The source of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """The use of the generated tokens."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """Token counts. `grammar`: for answers with one."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    grammar: GrammarReport | UnsetType = UNSET


class ResponseError(msgspec.Struct):
    """Reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Reason why a response is incomplete."""

    reason: str


class PromptCacheDiagnostics(msgspec.Struct, kw_only=True):
    """The prompt beside that of `prompt_cache_options.comparison_response_id`.

    A `cache_miss` has as `reason` model_changed, tools_changed or input_changed, and the tokens that were not cached
    because of it; `unavailable`: both begin alike, and the memory was evicted.
    """

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: str | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET


class ResponseBody(msgspec.Struct, kw_only=True):
    """The response object; settings of the request are echoed."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None = None
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | UnsetType = UNSET
    user: str | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    metadata: dict[str, Any] = {}
    prompt_cache_diagnostics: PromptCacheDiagnostics | UnsetType = UNSET
    truncated: Truncated | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class InputTokensBody(msgspec.Struct, kw_only=True):
    """The body of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    warnings: list[str] | UnsetType = UNSET


class DeletedBody(msgspec.Struct, kw_only=True):
    """The body of an answer to `DELETE`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemsBody(msgspec.Struct, kw_only=True):
    """A page of the items that a response was made from."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream; `type` says which of the other fields are present."""

    type: str
    sequence_number: int
    response: ResponseBody | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
