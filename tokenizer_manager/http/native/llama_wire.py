"""The bodies of llama-server's routes, in its form."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from ....models.tokenizer.fim import Extra
from ....runtime.sampling_params import MAX_TEMPERATURE
from ..pooling.wire import PoolingFields
from ..schema.accounting import PromptProgress, Timings
from ..schema.field_types import CountOrNone, Int, Priority, Prompts, Salt, Seconds, WideTemperature
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
    return_progress: bool | None = None
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
    prompt_progress: PromptProgress | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class NextToken(msgspec.Struct, kw_only=True):
    """How far an answer is; `n_remain`: -1 for no answer."""

    has_next_token: bool
    n_remain: int
    n_decoded: int


class SlotBody(msgspec.Struct, kw_only=True):
    """A running request in numbers, without its texts and without an id.

    Attributes:
        id: its place in the list.
        id_task: -1.
        n_ctx: tokens of a prompt with its answer.
        speculative: whether the server drafts tokens.
        n_prompt_tokens: of the prompt.
        params: the sampling parameters of `/completion`, in `/props` only.
    """

    id: int
    id_task: int = -1
    n_ctx: int
    speculative: bool
    is_processing: bool
    n_prompt_tokens: int = 0
    next_token: NextToken
    params: dict[str, Any] | UnsetType = UNSET


class PropsBody(msgspec.Struct, kw_only=True):
    """The model and the settings of the server."""

    default_generation_settings: SlotBody
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    bos_token: str
    eos_token: str
    chat_template: str
    build_info: str
    is_sleeping: bool = False


class LoraBody(msgspec.Struct):
    """A LoRA adapter. `scale` is 0: it computes requests that name it in `model`, and no others."""

    id: int
    path: str
    scale: float = 0.0


class AppliedTemplateBody(msgspec.Struct, kw_only=True):
    """The prompt of a chat."""

    prompt: str
    warnings: list[str] | UnsetType = UNSET


class LlamaEmbeddingRequest(PoolingFields, kw_only=True):
    """Body of `POST /embedding`."""

    content: Prompts
    embd_normalize: Int | None = None


class LlamaEmbedding(msgspec.Struct, kw_only=True):
    """The vector of one text; warnings are in the first."""

    index: int
    embedding: list[list[float]]
    warnings: list[str] | UnsetType = UNSET
