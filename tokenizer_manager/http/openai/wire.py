"""The bodies of `/v1/chat/completions`, `/v1/completions` and their `/render`, as typed structs.

A field of a request is optional if OpenAI's is, and null means absent.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ....grammar.answer_report import Truncated
from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ..schema.accounting import PromptProgress, Timings, UsageBody
from ..schema.cache_fields import CacheOptions
from ..schema.field_types import (
    AnswerLimit,
    Count,
    CountOrNone,
    Effort,
    Messages,
    PredictLimit,
    Prompts,
    ToolChoiceField,
)
from ..schema.generation_fields import GenerationFields, answer_limit
from ..schema.values import check_count


class ChatRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/chat/completions`; `messages` is checked one by one in `chat_messages`."""

    messages: Messages
    max_completion_tokens: AnswerLimit = None
    n_predict: PredictLimit = None
    logprobs: bool | None = None
    top_logprobs: CountOrNone | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: ToolChoiceField = None
    reasoning_effort: Effort | None = None
    prompt_cache_options: CacheOptions | None = None
    thinking_token_budget: CountOrNone | None = None
    thinking: dict[str, Any] | None = None  # Anthropic's form: type, budget_tokens
    reasoning: dict[str, Any] | None = None  # OpenRouter's form: effort, max_tokens
    reasoning_control: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    def max_new_tokens(self) -> tuple[int | None, str]:
        """The requested length, and the field that has it.

        Raises:
            RequestError: two fields disagree, or it is below 1.
        """
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}, "
                f"but they mean the same; send one",
                param="max_tokens",
                code="invalid_value",
            )
        if self.max_completion_tokens is not None:
            name, value = "max_completion_tokens", self.max_completion_tokens
            return answer_limit(value, name), name
        if self.n_predict and self.max_tokens is None:
            return answer_limit(self.n_predict, "n_predict"), "n_predict"
        return answer_limit(self.max_tokens, "max_tokens"), "max_tokens"

    def num_top_logprobs(self, limits: RequestLimits) -> int | None:
        """k, or None if no log-probabilities are requested.

        Raises:
            RequestError: `top_logprobs` without `logprobs`, or out of range.
        """
        if self.logprobs:
            count = self.top_logprobs or 0
            check_count("top_logprobs", count, 0, limits.max_logprobs, "max_logprobs")
            return count
        if self.top_logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}, but logprobs is not true; set it or leave both out",
                param="top_logprobs",
                code="invalid_value",
            )
        return None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/completions`; `prompt` may take four forms, see `prompts_of`."""

    prompt: Prompts
    suffix: str | None = None
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: CountOrNone | None = None
    add_special_tokens: bool | None = None


class PromptTokenLogprob(msgspec.Struct):
    """A token at a position of the prompt, in the form of vLLM.

    `rank`: 1 for the likeliest; null for one of `logprob_token_ids` that is not among the k likeliest.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptTokenLogprob] | None]
"""For each token of the prompt, token id -> the token itself, first, and the likeliest; None for the first token."""


C = TypeVar("C")


class OpenAIBody(msgspec.Struct, Generic[C], kw_only=True):
    """A response in one piece, or one event of a stream. A subclass sets `object`.

    Attributes:
        prompt_token_ids, prompt_logprobs: of a chat; completions have those of each choice.
    """

    id: str
    object: str = ""
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    choices: list[C]
    usage: UsageBody | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionBody(msgspec.Struct):
    """The function of a call; `arguments` is the JSON that the model wrote."""

    name: str
    arguments: str


class CustomBody(msgspec.Struct):
    """A call of a custom tool."""

    name: str
    input: str


class ToolCallBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tool call."""

    id: str
    type: str
    function: FunctionBody | UnsetType = UNSET
    custom: CustomBody | UnsetType = UNSET


class ChatMessageBody(msgspec.Struct, kw_only=True):
    """The assistant's message; clients expect the field `refusal`."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    function_call: FunctionBody | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    truncated: Truncated | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET


class ChatCompletion(OpenAIBody[ChatChoice], kw_only=True):
    """The body in one piece."""

    object: str = "chat.completion"
    usage: UsageBody
    timings: Timings


class ChatChunkChoice(msgspec.Struct):
    """The new part of one answer."""

    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    truncated: Truncated | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET


class ChatChunk(OpenAIBody[ChatChunkChoice], kw_only=True):
    """One event of a stream; the first one has the ids of the prompt."""

    object: str = "chat.completion.chunk"


class ChatTopLogprob(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """One token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a completions choice: parallel lists; a prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One answer, or the new part of it; the ids of a stream's prompt are in the first part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    truncated: Truncated | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET


class Completion(OpenAIBody[CompletionChoice], kw_only=True):
    """The body, or one event of a stream: the completions API has one shape for both."""

    object: str = "text_completion"


class RenderedBody(msgspec.Struct, kw_only=True):
    """The prompt of a request as token ids, and its options under the names that `/generate` has for them.

    Attributes:
        token_ids: for `input_ids` of `/generate`, or `prompt` of `/v1/completions`.
        prompt: their text; absent if the client sent ids.
        model: the name of the model or the adapter that would answer.
        sampling_params: for `/generate`, with the defaults of this server.
        priority: as a number.
    """

    token_ids: list[int]
    prompt: str | UnsetType = UNSET
    model: str
    sampling_params: dict[str, Any]
    stream: bool
    priority: int
    cache_salt: str | UnsetType = UNSET
    lora_path: str | UnsetType = UNSET
    return_logprob: Literal[True] | UnsetType = UNSET
    top_logprobs_num: int | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
