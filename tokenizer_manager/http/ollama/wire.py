"""The bodies of Ollama's API, and the fate of other fields. Durations are in nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....runtime.sampling_params import MAX_TEMPERATURE
from ..schema.field_policy import FieldPolicy, NotYet, policy_of
from ..schema.field_types import Int, StopString, number_fields

Format = Annotated[Any, Meta(description="json, or a JSON Schema.")]
Think = Annotated[bool | str | None, Meta(description="Whether to reason, or an effort.")]


OWN_NAMES: Final = {"repetition_penalty": "repeat_penalty"}
"""Name of a sampling parameter -> Ollama's."""

if TYPE_CHECKING:
    _Numbers = msgspec.Struct
else:
    _Numbers = msgspec.defstruct(
        "_Numbers", number_fields(renamed=OWN_NAMES, max_temperature=MAX_TEMPERATURE), kw_only=True
    )


class OllamaOptions(_Numbers, kw_only=True):
    """`options` of a request: the numbers among the sampling parameters, and Ollama's own."""

    num_predict: Int | None = None
    num_ctx: Int | None = None
    stop: str | list[StopString] | None = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """The fields that both requests have."""

    model: str | None = None
    format: Format = None
    options: dict[str, Any] | None = None
    stream: bool | None = None
    think: Think = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """Body of `POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """Body of `POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /api/show`."""

    model: str | None = None
    name: str | None = None


class OllamaPullRequest(OllamaShowRequest, kw_only=True):
    """Body of `POST /api/pull`."""

    stream: bool | None = None


_NO_EFFECT: Final = {"keep_alive"}
_NOT_YET: Final[NotYet] = {
    "logprobs": (False,),
    "template": (),
    "top_logprobs": (0,),
}
OPTIONS_POLICY: Final = FieldPolicy(
    OllamaOptions,
    {
        "mirostat": (0,),
        "repeat_last_n": (-1, 64),
        "tfs_z": (1,),
    },
    no_effect={
        "embedding_only",
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "mirostat_eta",
        "mirostat_tau",
        "num_batch",
        "num_gpu",
        "num_keep",
        "num_thread",
        "numa",
        "penalize_newline",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    },
)

CHAT_POLICY: Final = FieldPolicy(
    OllamaChatRequest,
    _NOT_YET | {"images": ()},
    no_effect=_NO_EFFECT,
    nested={
        "options": OPTIONS_POLICY,
        "tools": policy_of((), (), {"function": policy_of(("name", "description", "parameters"))}),
    },
)
GENERATE_POLICY: Final = FieldPolicy(
    OllamaGenerateRequest,
    _NOT_YET | {"context": (), "width": (0,), "height": (0,), "steps": (0,)},
    no_effect=_NO_EFFECT,
    nested={"options": OPTIONS_POLICY},
)
SHOW_POLICY: Final = FieldPolicy(OllamaShowRequest, {}, no_effect={"verbose"})
PULL_POLICY: Final = FieldPolicy(OllamaPullRequest, {}, no_effect={"insecure"})


class CalledFunction(msgspec.Struct):
    """A tool and its arguments."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: CalledFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message, or its new part."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """The fields that the answers of both endpoints have. Lines of a stream before the last have the first three."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class OllamaChatBody(OllamaAnswer, kw_only=True):
    """The answer of `/api/chat`, or a line of it."""

    message: OllamaMessage


class OllamaGenerateBody(OllamaAnswer, kw_only=True):
    """The answer of `/api/generate`, or a line of it."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class ModelDetails(msgspec.Struct, kw_only=True):
    """Facts about a model."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TaggedModel(msgspec.Struct, kw_only=True):
    """A model in `/api/tags`."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class TagsBody(msgspec.Struct):
    """The body of `/api/tags`."""

    models: list[TaggedModel]


class RunningModel(msgspec.Struct, kw_only=True):
    """A model in `/api/ps`."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: ModelDetails
    expires_at: str
    context_length: int


class RunningBody(msgspec.Struct):
    """The body of `/api/ps`."""

    models: list[RunningModel]


class ShowBody(msgspec.Struct, kw_only=True):
    """The body of `/api/show`."""

    modelfile: str
    parameters: str = ""
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    warnings: list[str] | UnsetType = UNSET


class PullBody(msgspec.Struct, kw_only=True):
    """The body of `/api/pull`: the model is there."""

    status: str = "success"
    warnings: list[str] | UnsetType = UNSET


class VersionBody(msgspec.Struct):
    """The body of `/api/version`."""

    version: str
