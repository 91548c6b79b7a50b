"""The requests of all endpoints as typed structs; a field is optional where OpenAI's is, and null means absent.

Only types are checked here: ranges by `SamplingParams.verify`, lengths by admission. What a struct does not list is
`field_policy`'s matter.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.sampling_params import MAX_SEED, SamplingParams
from ...admission.scheduling_options import Scheduling, checked_priority, checked_salt, checked_timeout
from ...conversation.chat_template import RESERVED_NAMES
from ..guards.caller import Caller
from ..guards.limits import DEFAULT_LIMITS, check_count, check_limit
from .field_types import (
    Count,
    CountOrNone,
    Int,
    LogitBias,
    Messages,
    OnePrompt,
    Penalty,
    Priority,
    Prompts,
    PromptsOrNone,
    RepetitionPenalty,
    Salt,
    SamplingObject,
    Seconds,
    Share,
    StartLen,
    StopString,
    Temperature,
    TimeToLive,
    TokenId,
    TopK,
)
from .json_body import convert, show

V = TypeVar("V")


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream shall hold besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: no effect on the answer


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling fields that have the same name everywhere."""

    n: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Int | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    skip_special_tokens: bool | None = None

    def num_choices(self, limits: RequestLimits) -> int:
        """Answers per prompt.

        Raises:
            RequestError: out of range.
        """
        count = _or(self.n, 1)
        check_count("n", count, 1, limits.max_n, "max_n")
        return count

    def sampling(
        self,
        limits: RequestLimits,
        *,
        max_new_tokens: int | None,
        min_new_tokens: int | None,
        keep_stop: bool | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The sampling parameters; errors have the names of their fields, which `renamed_fields` changes.

        Raises:
            RequestError: a bad key in `logit_bias`, a value out of range, or too much of something.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        check_limit("stop", len(stop), "strings", limits.max_stop_strings, "max_stop_strings")
        longest = max(map(len, stop), default=0)
        check_limit("stop", longest, "characters in a string", limits.max_stop_chars, "max_stop_chars")
        num_ids = len(self.stop_token_ids or ())
        check_limit("stop_token_ids", num_ids, "ids", limits.max_stop_strings, "max_stop_strings")
        num_biases = len(self.logit_bias or ())
        check_limit("logit_bias", num_biases, "entries", limits.max_logit_bias, "max_logit_bias")
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if count is not None:
                check_count(name, count, 0, limits.max_logprobs, "max_logprobs")
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=_or(min_new_tokens, 0),
            temperature=_or(self.temperature, 1.0),
            # OpenAI's range begins at 0, where nothing but the likeliest token is left; ours begins above.
            top_p=_or(self.top_p, 1.0) if self.top_p != 0 else 1.0,
            top_k=_or(self.top_k, -1) if self.top_p != 0 else 1,
            min_p=_or(self.min_p, 0.0),
            seed=None if self.seed is None else self.seed & MAX_SEED,  # OpenAI takes negative ones
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            logit_bias=_logit_bias(self.logit_bias),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=_or(self.skip_special_tokens, True),
            include_stop_str_in_output=bool(keep_stop),
        )


class GenerationFields(SamplingFields, kw_only=True):
    """What chat completions and completions have in common: OpenAI's fields, and those of other open engines.

    `queue_timeout` and `timeout` count from arrival, to the start and to the end of the generation. `user` names the
    tenant to whom the request is accounted; without it, requests with one API key are one tenant.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: CountOrNone | None = None
    include_stop_str_in_output: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None

    def events(self) -> StreamOptions | None:
        """How to stream, or None to answer in one piece.

        Raises:
            RequestError: `stream_options` without `stream`.
        """
        if self.stream:
            return self.stream_options or StreamOptions()
        if self.stream_options is not None:
            raise RequestError(
                "stream_options is set, but stream is not true; leave it out or stream",
                param="stream_options",
                code="invalid_value",
            )
        return None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/chat/completions`; `messages` is checked one by one in `chat_messages`."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: CountOrNone | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def max_new_tokens(self) -> tuple[int | None, str]:
        """The length asked for, and the field that asks.

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
        """k, or None if no log-probabilities are wanted.

        Raises:
            RequestError: `top_logprobs` without `logprobs`, or out of range.
        """
        if self.logprobs:
            count = _or(self.top_logprobs, 0)
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

    max_new_tokens: Count | None = None
    min_new_tokens: CountOrNone | None = None
    best_of: Count | None = None
    no_stop_trim: bool | None = None


class NativeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /generate`: a text or a list of them, or token ids or a list of those."""

    one_of: ClassVar = ("text", "input_ids")

    text: PromptsOrNone = None
    input_ids: PromptsOrNone = None
    sampling_params: SamplingObject | None = None
    stream: bool | None = None
    incremental: bool | None = None  # chunks hold what is new, not all so far
    return_logprob: bool | None = None
    top_logprobs_num: CountOrNone | None = None
    logprob_start_len: StartLen | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None
    rid: Any = None  # taken and not used, which is said


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or chat messages, which are rendered first."""

    one_of: ClassVar = ("prompt", "messages")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class PinRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/cache/pins`: a prompt or chat messages, and for how many seconds; 0 unpins."""

    one_of: ClassVar = ("prompt", "messages")

    ttl: TimeToLive
    model: str | None = None
    prompt: OnePrompt = None
    messages: Messages | None = None
    cache_salt: Salt | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of `POST /abort_request`: the `id` of an answer, as the server gave it, or all."""

    rid: str | None = None
    abort_all: bool | None = None


# ---------------------------------------------------------------- shared readings


def scheduling_of(request: GenerationFields | NativeRequest, caller: Caller) -> Scheduling:
    """How a request wants to be scheduled.

    Raises:
        RequestError: a value is out of range.
    """
    return Scheduling(
        priority=checked_priority(request.priority),
        tenant=caller.tenant(request.user),
        extra_key=caller.namespace(checked_salt(request.cache_salt)),
        queue_timeout_s=checked_timeout(request.queue_timeout, "queue_timeout"),
        timeout_s=checked_timeout(request.timeout, "timeout"),
        owner=caller.owner,
    )


def prompts_of(value: object, param: str, limits: RequestLimits = DEFAULT_LIMITS) -> list[str | list[int]]:
    """The prompts in a field that is a string, a list of strings, token ids, or a list of token ids.

    Raises:
        RequestError: anything else, or nothing in it.
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
            prompts: list[str | list[int]] = [*convert(value, list[str], param)]
        case [list(), *_]:
            prompts = [*convert(value, list[list[Int]], param)]
        case list():
            return [convert(value, list[Int], param)]
        case _:
            raise RequestError(
                f"{param} is {show(value)}, but it must be a string, a list of strings, a list of token ids or a list "
                f"of such lists",
                param=param,
                code="invalid_type",
            )
    check_limit(param, len(prompts), "prompts", limits.max_prompts, "max_prompts")
    for i, prompt in enumerate(prompts):
        if not prompt:
            at = f"{param}[{i}]"
            raise RequestError(
                f"{at} is empty; a prompt has at least one token", param=at, code="empty_prompt"
            )
    return prompts


def at_least_one(value: int | None, param: str) -> int | None:
    """`value`, checked under the name the client used.

    Raises:
        RequestError: it is below 1.
    """
    if value is not None and value < 1:
        raise RequestError(
            f"{param} is {value}, but it must be at least 1", param=param, code="invalid_value"
        )
    return value


def checked_template_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, which must not replace what the server sets.

    Raises:
        RequestError: it would.
    """
    taken = sorted(RESERVED_NAMES & (variables or {}).keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs has {show(taken[0])}, which the server sets; leave it out",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    return variables or {}


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 16):
            message = f"logit_bias has the key {show(key)}, but keys must be token ids"
            raise RequestError(message, param="logit_bias", code="invalid_value")
        by_id[int(key)] = value
    return by_id


def _or(value: V | None, default: V) -> V:
    return default if value is None else value
