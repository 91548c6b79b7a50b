"""The bodies of `/generate`, in the form of SGLang."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from ....grammar.answer_report import GrammarReport, Truncated
from ....runtime.sampling_params import MAX_TEMPERATURE
from ..schema.cache_fields import SessionParams
from ..schema.field_types import (
    BootstrapHost,
    BootstrapPort,
    BootstrapRoom,
    Count,
    CountOrNone,
    ImageData,
    LoraPaths,
    Priority,
    PromptsOrNone,
    ReplicaNumber,
    Salt,
    SamplingObject,
    Seconds,
    StartLen,
    TokenId,
    WideTemperature,
)
from ..schema.generation_fields import SamplingFields
from ..schema.kv_hints import KvHints


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
    image_data: ImageData = None
    add_special_tokens: bool | None = None
    sampling_params: SamplingObject | None = None
    stream: bool | None = None
    incremental: bool | None = None  # chunks have the new text instead of all text so far
    return_logprob: bool | None = None
    top_logprobs_num: CountOrNone | None = None
    logprob_start_len: StartLen | None = None
    token_ids_logprob: list[TokenId] | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    safety_identifier: str | None = None
    session_id: Salt | None = None
    kv_hints: KvHints | None = None
    session_params: SessionParams | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None
    data_parallel_rank: ReplicaNumber | None = None
    bootstrap_host: BootstrapHost = None
    bootstrap_port: BootstrapPort = None
    bootstrap_room: BootstrapRoom = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_path: LoraPaths = None
    rid: Any = None  # accepted with a warning, and not used


LogprobRow = tuple[float | None, int, str]
"""Log-probability, token id, token."""


class MetaInfo(msgspec.Struct):
    """Data about one answer."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    queue_time: float
    e2e_latency: float
    input_token_logprobs: list[LogprobRow] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobRow] | None] | UnsetType = UNSET
    output_token_logprobs: list[LogprobRow] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobRow]] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[LogprobRow] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[LogprobRow]] | UnsetType = UNSET
    grammar: GrammarReport | UnsetType = UNSET
    truncated: Truncated | UnsetType = UNSET
    cached_tokens_by_tier: dict[str, int] | UnsetType = UNSET  # those that were not in the KV pool


class GenerateBody(msgspec.Struct):
    """One answer."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
