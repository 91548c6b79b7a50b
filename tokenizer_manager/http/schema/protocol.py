"""The request bodies of all endpoints as typed structs. A field is optional if OpenAI's is, and null means absent.

Only types are checked here. `field_policy` decides about fields that a struct does not list.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.sampling_params import MAX_TEMPERATURE
from ...conversation.chat_template import RESERVED_NAMES
from .field_types import (
    BootstrapHost,
    BootstrapPort,
    BootstrapRoom,
    Count,
    CountOrNone,
    Effort,
    Int,
    LoraPaths,
    Messages,
    OnePrompt,
    Priority,
    Prompts,
    PromptsOrNone,
    ReplicaNumber,
    Salt,
    SamplingObject,
    Seconds,
    StartLen,
    TimeToLive,
    TokenId,
    ToolChoiceField,
    WideTemperature,
)
from .generation_fields import GenerationFields, SamplingFields, at_least_one
from .json_body import convert, show
from .limits import DEFAULT_LIMITS, check_count, check_limit


class ChatRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/chat/completions`; `messages` is checked one by one in `chat_messages`."""

    messages: Messages
    max_completion_tokens: Count | None = None
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
    thinking_token_budget: CountOrNone | None = None
    thinking: dict[str, Any] | None = None  # Anthropic's form: type, budget_tokens
    reasoning: dict[str, Any] | None = None  # OpenRouter's form: effort, max_tokens
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
            return at_least_one(value, name), name
        return at_least_one(self.max_tokens, "max_tokens"), "max_tokens"

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
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: CountOrNone | None = None
    add_special_tokens: bool | None = None


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of `POST /generate`."""

    max_temperature: ClassVar[float] = MAX_TEMPERATURE

    temperature: WideTemperature | None = None
    max_new_tokens: Count | None = None
    min_new_tokens: CountOrNone | None = None
    best_of: Count | None = None
    no_stop_trim: bool | None = None


class NativeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /generate`: a text or a list of them, or token ids or a list of those."""

    one_of: ClassVar = ("text", "input_ids")

    text: PromptsOrNone = None
    input_ids: PromptsOrNone = None
    add_special_tokens: bool | None = None
    sampling_params: SamplingObject | None = None
    stream: bool | None = None
    incremental: bool | None = None  # chunks have the new text instead of all text so far
    return_logprob: bool | None = None
    top_logprobs_num: CountOrNone | None = None
    logprob_start_len: StartLen | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None
    data_parallel_rank: ReplicaNumber | None = None
    bootstrap_host: BootstrapHost = None
    bootstrap_port: BootstrapPort = None
    bootstrap_room: BootstrapRoom = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_path: LoraPaths = None
    rid: Any = None  # accepted with a warning, and not used


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or chat messages, which are rendered."""

    one_of: ClassVar = ("prompt", "messages")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class PinRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/cache/pins`: a prompt or chat messages, and a time in seconds; 0 unpins."""

    one_of: ClassVar = ("prompt", "messages")

    ttl: TimeToLive
    model: str | None = None
    prompt: OnePrompt = None
    messages: Messages | None = None
    tools: list[Any] | None = None
    cache_salt: Salt | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of `POST /abort_request`: the `id` from a response, or all requests."""

    rid: str | None = None
    abort_all: bool | None = None


# ---------------------------------------------------------------- shared by several endpoints


def prompts_of(
    value: object, param: str, limits: RequestLimits = DEFAULT_LIMITS, *, max_prompt_len: int
) -> list[str | list[int]]:
    """The prompts in a field that is a string, a list of strings, token ids, or a list of token ids.

    Counts and lengths are checked before values are looked at.

    Args:
        value: the field.
        param: its name.
        limits: on how many prompts there may be.
        max_prompt_len: token ids that the context holds.

    Raises:
        RequestError: another type, or empty.
    """
    match value:
        case None:
            raise RequestError(
                f"{param} is missing; the request must have it", param=param, code="missing_field"
            )
        case "" | []:
            raise RequestError(
                f"{param} is empty; a prompt has at least one token", param=param, code="empty_prompt"
            )
        case str():
            return [value]
        case [str(), *_]:
            check_limit(param, len(value), "prompts", limits.max_prompts, "max_prompts")
            prompts: list[str | list[int]] = [*convert(value, list[str], param)]
        case [list(), *_]:
            check_limit(param, len(value), "prompts", limits.max_prompts, "max_prompts")
            prompts = [_ids(ids, f"{param}[{i}]", max_prompt_len) for i, ids in enumerate(value)]
        case list():
            return [_ids(value, param, max_prompt_len)]
        case _:
            raise RequestError(
                f"{param} is {show(value)}, but it must be a string, a list of strings, a list of token ids or a list "
                f"of such lists",
                param=param,
                code="invalid_type",
            )
    for i, prompt in enumerate(prompts):
        if not prompt:
            at = f"{param}[{i}]"
            raise RequestError(
                f"{at} is empty; a prompt has at least one token", param=at, code="empty_prompt"
            )
    return prompts


def _ids(value: object, param: str, max_prompt_len: int) -> list[int]:
    if isinstance(value, list) and len(value) > max_prompt_len:
        raise RequestError(
            f"{param} has {len(value)} token ids, but the context holds {max_prompt_len}; send fewer, or raise "
            f"--max-model-len",
            param=param,
            code="context_length_exceeded",
        )
    return convert(value, list[Int], param)


def checked_template_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, which must not replace the variables that the server sets.

    Raises:
        RequestError: it does.
    """
    taken = sorted(RESERVED_NAMES & (variables or {}).keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs has {show(taken[0])}, which the server sets; leave it out",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    return variables or {}
