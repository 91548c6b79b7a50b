"""The bodies of `/infill` and `/completion`, in the form of llama-server."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from ....models.tokenizer.fim import Extra
from ....runtime.sampling_params import MAX_TEMPERATURE
from ..schema.accounting import Timings
from ..schema.field_types import CountOrNone, Int, Priority, Salt, Seconds, WideTemperature
from ..schema.generation_fields import SamplingFields


class LlamaFields(SamplingFields, kw_only=True):
    """The fields that both routes have."""

    max_temperature: ClassVar[float] = MAX_TEMPERATURE

    temperature: WideTemperature | None = None
    model: str | None = None
    n_predict: Int | None = None
    n_indent: CountOrNone | None = None
    t_max_predict_ms: Int | None = None
    samplers: list[str] | str | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None
    stream: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    session_id: Salt | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None


class InfillRequest(LlamaFields, kw_only=True):
    """Body of `POST /infill`."""

    input_prefix: str
    input_suffix: str
    input_extra: list[Extra] | None = None
    prompt: str | None = None


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """Body of `POST /completion`."""

    prompt: str | list[Int]


class LlamaBody(msgspec.Struct, kw_only=True):
    """An answer, or a part of one in a stream; the fields after `tokens_evaluated` are in the last part only,
    and `response_fields` leaves out any.
    """

    index: int = 0
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    id_slot: int = -1
    stop: bool | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
