"""The bodies of the endpoints that do not generate, as typed structs; `/openapi.json` is made from them, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....models.spec.model_spec import ModelSpec
from ....runtime.config.answer_config import RequestLimits
from ....runtime.config.engine_config import DisaggregationMode
from ....runtime.config.server_config import LogLevel
from ....runtime.sampling_params import NUMBERS
from ..schema.field_types import Messages, OnePrompt, Salt, TimeToLive, TokenId

Warnings = list[str] | UnsetType


class HealthBody(msgspec.Struct):
    """The engine is healthy; `paused`: and an admin has paused it."""

    status: Literal["ok", "paused"] = "ok"


if TYPE_CHECKING:
    _Numbers = msgspec.Struct
else:
    _Numbers = msgspec.defstruct(
        "_Numbers", [(name, kind) for name, kind, bounds in NUMBERS if bounds.from_model], kw_only=True
    )


class SamplingDefaultsBody(_Numbers, kw_only=True):
    """The sampling parameters of requests without their own, and the source of those that the model's files set."""

    source: str


class ModelBody(msgspec.Struct, kw_only=True):
    """A model, in OpenAI's format, and what it does. An adapter has its base model as `parent`, its path as `root`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "engine"
    max_model_len: int
    task: Literal["generate", "embed", "score"]
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    embedding_size: int | UnsetType = UNSET
    sampling_defaults: SamplingDefaultsBody | UnsetType = UNSET


class CodexEffortBody(msgspec.Struct):
    """An effort of reasoning that a user of Codex can choose."""

    effort: str
    description: str


class CodexModelBody(msgspec.Struct, kw_only=True):
    """A model as Codex reads it: it needs the context's size to compact a session in time.

    Attributes:
        slug: the model's name in requests.
        base_instructions: Codex demands them, and sends them instead of its own.
        truncation_policy: of the outputs of tools.
    """

    slug: str
    display_name: str
    description: str = ""
    supported_reasoning_levels: list[CodexEffortBody]
    shell_type: str = "default"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int = 0
    base_instructions: str
    supports_reasoning_summaries: bool
    support_verbosity: bool = False
    truncation_policy: dict[str, Any]
    supports_parallel_tool_calls: bool = True
    context_window: int
    experimental_supported_tools: tuple[str, ...] = ()
    input_modalities: tuple[str, ...] = ("text",)


class ModelsBody(msgspec.Struct, kw_only=True):
    """The served models; `models` are those that chat, for Codex."""

    object: Literal["list"] = "list"
    data: list[ModelBody]
    models: list[CodexModelBody]


class TokenPiece(msgspec.Struct):
    """A token: its text, or its bytes if they are no text."""

    id: int
    piece: str | list[int]


class TokensBody(msgspec.Struct, kw_only=True):
    """Token ids and their text; in llama-server's form only the ids, with the text of each on request."""

    tokens: list[int | TokenPiece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    warnings: Warnings = UNSET


class TextBody(msgspec.Struct, kw_only=True):
    """A text, under the names that other engines use."""

    text: str
    prompt: str
    content: str
    warnings: Warnings = UNSET


class PinnedBody(msgspec.Struct, kw_only=True):
    """How much of a prefix is pinned; `reason` says why it is not all."""

    pinned_tokens: int
    asked_tokens: int
    reason: str
    warnings: Warnings = UNSET


class AbortedBody(msgspec.Struct, kw_only=True):
    """The number of aborted requests."""

    aborted: int
    warnings: Warnings = UNSET


class FlushedBody(msgspec.Struct):
    """Tokens evicted from the prefix cache, and those that could not be.

    Attributes:
        success: all were, as vLLM's clients ask.
    """

    flushed_tokens: int
    kept_tokens: int
    success: bool


class WorldSizeBody(msgspec.Struct):
    """Processes that compute, as vLLM counts them: ranks of all replicas."""

    world_size: int


class LogLevelBody(msgspec.Struct, kw_only=True):
    """The lowest severity that is logged."""

    level: LogLevel
    warnings: Warnings = UNSET


class ProfileStartedBody(msgspec.Struct, kw_only=True):
    """The folder of the files, the seconds until the profile ends, and the samples per second."""

    folder: str
    duration: float
    rate: float
    warnings: Warnings = UNSET


class ProfileBody(msgspec.Struct, kw_only=True):
    """The files of a profile, and the processes that have not written one within ten seconds."""

    folder: str
    files: tuple[str, ...]
    missing: tuple[str, ...]


class WhyBody(msgspec.Struct, kw_only=True):
    """Reason why a request waited, was retracted or missed the cache: a sentence and a table."""

    id: str
    found: Literal[True] = True
    sentence: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class LiveRequestBody(msgspec.Struct, kw_only=True):
    """The state of one live request in numbers."""

    id: str
    phase: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    age_s: float
    ttft_s: float | None
    num_retractions: int
    priority: int
    reason: str
    why: str
    need: int
    have: int
    service_tier: str


class LiveRequestsBody(msgspec.Struct, kw_only=True):
    """The listed live requests, and the number of all."""

    object: Literal["list"] = "list"
    total: int
    last_pass: dict[str, int]
    data: list[LiveRequestBody]


class ReplicaBody(msgspec.Struct, kw_only=True):
    """One replica of the model (`--dp`).

    Attributes:
        reason: why it is not healthy; null if it is.
        scheduler: its latest report, also of a lost one; null before the first.
    """

    replica: int
    reason: str | None
    scheduler: dict[str, Any] | None


class ServerInfoBody(msgspec.Struct, kw_only=True):
    """Settings, capacity, the model's facts, limits, and the scheduler's latest report.

    Attributes:
        model_path: this and the fields down to `disaggregation_mode` are what routers look for.
        dp_size: replicas behind this address.
        max_running_requests, max_total_num_tokens: of each replica, as `capacity`.
        disaggregation_mode: "null": this server computes prompts and decodes.
        disaggregation_bootstrap_port: of a prefill engine, where decode engines claim prompts.
        internal_states: the load of each replica, as SGLang's benchmarks and routers look for it.
        vllm_config: what trainers look for with `config_format=json`.
    """

    version: str
    model: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    tp_size: int
    pp_size: int
    dp_size: int
    max_running_requests: int
    max_total_num_tokens: int
    disaggregation_mode: DisaggregationMode = "null"
    disaggregation_bootstrap_port: int | None = None
    config: dict[str, dict[str, Any]]
    capacity: dict[str, int | bool]
    model_spec: ModelSpec
    limits: RequestLimits
    num_live_requests: int
    scheduler: dict[str, Any] | None
    replicas: list[ReplicaBody] = []
    internal_states: list[dict[str, Any]] = []
    vllm_config: dict[str, Any] | UnsetType = UNSET


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or chat messages, which are rendered; or `content` in llama-server's form."""

    one_of: ClassVar = ("prompt", "messages", "content")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    content: str | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


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
