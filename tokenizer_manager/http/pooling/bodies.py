"""The response bodies of the pooling endpoints."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..schema.accounting import PromptTokensDetails

Warnings = list[str] | UnsetType


class PoolingUsage(msgspec.Struct):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or base64 of their little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """The vectors, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    warnings: Warnings = UNSET


class RankedText(msgspec.Struct):
    """A document's text."""

    text: str


class Ranked(msgspec.Struct):
    """A document's relevance to the query; `document` if it was asked for."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RerankBody(msgspec.Struct, kw_only=True):
    """The documents by relevance, the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
    warnings: Warnings = UNSET


class Score(msgspec.Struct):
    """The score of one pair; several numbers for a classifier with several labels."""

    index: int
    score: float | list[float]
    object: Literal["score"] = "score"


class ScoreBody(msgspec.Struct, kw_only=True):
    """The scores, in the order of the pairs. `scores`: of items, one number per label."""

    id: str
    object: Literal["list", "scoring"] = "list"
    created: int
    model: str
    data: list[Score] | UnsetType = UNSET
    scores: list[list[float]] | UnsetType = UNSET
    usage: PoolingUsage
    warnings: Warnings = UNSET
