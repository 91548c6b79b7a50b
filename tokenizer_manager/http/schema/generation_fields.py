"""Request fields that several generating endpoints share, and the sampling parameters made from them.

Only types are checked here: ranges by `SamplingParams.verify`, lengths by admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec

from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.request_checks import check_number
from ....runtime.sampling_defaults import SamplingDefaults
from ....runtime.sampling_params import RepetitionDetection, SamplingParams
from .constraint_fields import ConstraintFields
from .field_policy import FieldPolicy
from .field_types import (
    MAX_OPENAI_TEMPERATURE,
    NO_LIMIT,
    AnswerLimit,
    BootstrapHost,
    BootstrapPort,
    BootstrapRoom,
    CompletionWindow,
    Count,
    CountOrNone,
    Int,
    LogitBias,
    Priority,
    ReplicaNumber,
    Retention,
    Salt,
    Seconds,
    ServiceTier,
    StopString,
    TokenId,
    number_fields,
)
from .kv_hints import KvHints
from .values import DEFAULT_LIMITS, check_count, check_limit, convert, show

V = TypeVar("V")


class StreamOptions(msgspec.Struct, kw_only=True):
    """The contents of a stream besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding of the traffic: no effect on the answer


class BackgroundOptions(msgspec.Struct, kw_only=True):
    """`background_options`: the request runs on what others leave, and has this long."""

    completion_window: CompletionWindow | None = None


BACKGROUND_POLICY: Final = FieldPolicy(BackgroundOptions, {}, no_effect=())


if TYPE_CHECKING:
    _Numbers = ConstraintFields
else:
    _Numbers = msgspec.defstruct("_Numbers", number_fields(), bases=(ConstraintFields,), kw_only=True)


class SamplingFields(_Numbers, kw_only=True):
    """The sampling fields that have the same name everywhere, with the numbers of `SamplingParams`, and the
    constraints of answers.

    Attributes:
        max_temperature: 2 in the APIs that have OpenAI's range; the engine's own APIs go further.
    """

    max_temperature: ClassVar[float] = MAX_OPENAI_TEMPERATURE

    n: Count | None = None
    dry_sequence_breakers: list[StopString] | None = None
    temperature_last: bool | None = None
    bad_words: list[StopString] | None = None
    allowed_token_ids: list[TokenId] | None = None
    stop_regex: str | list[StopString] | None = None
    repetition_detection: RepetitionDetection | None = None
    stop: str | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    skip_special_tokens: bool | None = None
    speculative: bool | None = None

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
        defaults: SamplingDefaults,
        *,
        max_new_tokens: int | None,
        min_new_tokens: int | None,
        keep_stop: bool | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        prompt_logprobs_start: int = 0,
        logprob_token_ids: Sequence[int] | None = None,
    ) -> SamplingParams:
        """The sampling parameters; errors use the names of their fields, which `renamed_fields` changes.

        Args:
            limits: of the server.
            defaults: for the fields that the request leaves out.
            max_new_tokens, min_new_tokens, keep_stop, logprobs, prompt_logprobs, prompt_logprobs_start,
                logprob_token_ids: fields with other names or forms.

        Raises:
            RequestError: a bad key in `logit_bias`, a value out of range, or a limit is exceeded.
        """
        given = {name: getattr(self, name) for name in _SAME}
        if given["temperature"] is not None:
            check_number("temperature", given["temperature"], 0.0, self.max_temperature)
        stop = (self.stop,) if self.stop and isinstance(self.stop, str) else tuple(self.stop or ())
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
        breakers, allowed = self.dry_sequence_breakers, self.allowed_token_ids
        one = self.stop_regex if isinstance(self.stop_regex, str) else None
        regexes = (one,) if one else tuple(self.stop_regex or ())
        given |= {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "dry_sequence_breakers": None if breakers is None else tuple(breakers),
            "bad_words": tuple(self.bad_words or ()),
            "allowed_token_ids": None if allowed is None else tuple(allowed),
            "stop_regex": regexes,
            "logit_bias": _logit_bias(self.logit_bias),
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "prompt_logprobs_start": prompt_logprobs_start,
            "logprob_token_ids": tuple(logprob_token_ids or ()),
            "include_stop_str_in_output": keep_stop,
        }
        return defaults.params({name: value for name, value in given.items() if value is not None})


_SAME: Final = tuple(
    name for name in SamplingFields.__struct_fields__ if name in SamplingParams.__struct_fields__
)


class GenerationFields(SamplingFields, kw_only=True):
    """The common fields of chat completions and completions: OpenAI's, and those of other open engines.

    `queue_timeout` and `timeout` count from arrival, to the start and to the end of the generation. `user`, else
    `safety_identifier`, names the tenant that the request is accounted to; without them, the requests of one API key
    are one tenant.
    """

    model: str | None = None
    lora_path: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: CountOrNone | None = None
    logprob_token_ids: list[TokenId] | None = None
    max_tokens: AnswerLimit = None
    min_tokens: CountOrNone | None = None
    include_stop_str_in_output: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    safety_identifier: str | None = None
    session_id: Salt | None = None
    kv_hints: KvHints | None = None
    prompt_cache_key: Salt | None = None
    prompt_cache_retention: Retention | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None
    service_tier: ServiceTier | None = None
    background_options: BackgroundOptions | None = None
    data_parallel_rank: ReplicaNumber | None = None
    bootstrap_host: BootstrapHost = None
    bootstrap_port: BootstrapPort = None
    bootstrap_room: BootstrapRoom = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def reports_progress(self) -> bool:
        """Whether the stream says how much of the prompt is read."""
        return bool(self.stream and self.return_progress)

    def events(self) -> StreamOptions | None:
        """The options of the stream, or None for a response in one piece.

        Raises:
            RequestError: `stream_options` without `stream`, or `prompt_logprobs` with it.
        """
        if self.stream:
            if self.prompt_logprobs is not None:
                raise RequestError(
                    f"prompt_logprobs is {self.prompt_logprobs}, but stream is true, and events have no place for it; "
                    "leave out one",
                    param="prompt_logprobs",
                    code="unsupported_value",
                )
            return self.stream_options or StreamOptions()
        if self.stream_options is not None and any(msgspec.structs.astuple(self.stream_options)):
            raise RequestError(
                "stream_options is set, but stream is not true; leave it out or stream",
                param="stream_options",
                code="invalid_value",
            )
        return None


def answer_limit(value: int | None, param: str) -> int | None:
    """The limit of an answer's tokens; None: as many as fit.

    Raises:
        RequestError: it is neither a count nor -1.
    """
    return None if value == NO_LIMIT else at_least_one(value, param)


def at_least_one(value: int | None, param: str) -> int | None:
    """`value`, checked under the client's name of the field.

    Raises:
        RequestError: it is below 1.
    """
    if value is not None and value < 1:
        raise RequestError(
            f"{param} is {value}, but it must be at least 1", param=param, code="invalid_value"
        )
    return value


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
