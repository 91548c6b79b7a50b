"""What the endpoints answer that generate nothing, as typed structs; `/openapi.json` is made from them, too.

The answers of those that generate stand beside their handlers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.config.engine_config import LogLevel
from ....runtime.config.request_limits import RequestLimits
from ....runtime.model_files.model_spec import ModelSpec

Warnings = list[str] | UnsetType


class HealthBody(msgspec.Struct):
    """All is well."""

    status: Literal["ok"] = "ok"


class ModelBody(msgspec.Struct, kw_only=True):
    """A model, as OpenAI lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "engine"
    max_model_len: int


class ModelsBody(msgspec.Struct, kw_only=True):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


class TokensBody(msgspec.Struct, kw_only=True):
    """Token ids, and the text they are of."""

    tokens: list[int]
    count: int
    max_model_len: int
    prompt: str
    warnings: Warnings = UNSET


class TextBody(msgspec.Struct, kw_only=True):
    """A text, under both names that clients of other engines look for."""

    text: str
    prompt: str
    warnings: Warnings = UNSET


class PinnedBody(msgspec.Struct, kw_only=True):
    """How much of a prefix is pinned; `reason` says why not all."""

    pinned_tokens: int
    asked_tokens: int
    reason: str
    warnings: Warnings = UNSET


class AbortedBody(msgspec.Struct, kw_only=True):
    """How many requests were ended."""

    aborted: int
    warnings: Warnings = UNSET


class FlushedBody(msgspec.Struct):
    """Tokens that left the prefix cache, and those that could not."""

    flushed_tokens: int
    kept_tokens: int


class LogLevelBody(msgspec.Struct, kw_only=True):
    """The least severity that is logged."""

    level: LogLevel
    warnings: Warnings = UNSET


class ProfileStartedBody(msgspec.Struct, kw_only=True):
    """Where the files will be, for how many seconds the processes look, and how often in each."""

    folder: str
    duration: float
    rate: float
    warnings: Warnings = UNSET


class ProfileBody(msgspec.Struct, kw_only=True):
    """The files of a profile, and the processes that have not written theirs within ten seconds."""

    folder: str
    files: tuple[str, ...]
    missing: tuple[str, ...]


class WhyBody(msgspec.Struct, kw_only=True):
    """Why a request fared as it did: a sentence and a table."""

    id: str
    found: Literal[True] = True
    sentence: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class LiveRequestBody(msgspec.Struct, kw_only=True):
    """One live request, in figures."""

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


class LiveRequestsBody(msgspec.Struct, kw_only=True):
    """The live requests that are listed, and how many there are."""

    object: Literal["list"] = "list"
    total: int
    last_pass: dict[str, int]
    data: list[LiveRequestBody]


class ServerInfoBody(msgspec.Struct, kw_only=True):
    """Settings, capacity, the model's facts, limits, and the scheduler's latest report."""

    version: str
    model: str
    config: dict[str, dict[str, Any]]
    capacity: dict[str, int | bool]
    model_spec: ModelSpec
    limits: RequestLimits
    num_live_requests: int
    scheduler: dict[str, Any] | None
