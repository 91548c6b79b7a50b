"""The bodies of Ollama's API. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


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


class VersionBody(msgspec.Struct):
    """The body of `/api/version`."""

    version: str
