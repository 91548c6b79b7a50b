"""The bodies of the pooling endpoints, and which other fields they accept."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.request_checks import check_integer
from ....runtime.sampling_params import MAX_COUNT
from ..schema.accounting import PromptTokensDetails
from ..schema.field_policy import NO_EFFECT, FieldPolicy
from ..schema.field_types import (
    Count,
    CountOrNone,
    Int,
    Priority,
    Prompts,
    ReplicaNumber,
    Salt,
    Seconds,
    TokenId,
    documented,
)

TruncateLen = Annotated[
    Int,
    documented(
        "The most tokens of an input, the rest is cut; -1: as many as the model takes.",
        minimum=-1,
        maximum=MAX_COUNT,
    ),
]
Texts = Annotated[
    Any,
    documented(
        "A text, or a list of texts.",
        anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
    ),
]
Documents = Annotated[
    list[Any],
    documented(
        "Texts, or objects with the text under `text`.",
        items={
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
            ]
        },
        minItems=1,
    ),
]


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields of all pooling endpoints; as in `GenerationFields` where the names are the same."""

    model: str | None = None
    lora_path: str | None = None
    truncate_prompt_tokens: TruncateLen | None = None
    truncate: bool | None = None  # Text Embeddings Inference: as truncate_prompt_tokens -1
    user: str | None = None
    safety_identifier: str | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None
    data_parallel_rank: ReplicaNumber | None = None

    def truncate_len(self) -> int | None:
        """The most tokens of an input, -1 for as many as the model takes; None: a longer one is an error.

        Raises:
            RequestError: below 1 and not -1, or too large.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return -1 if self.truncate else None
        if limit == -1:
            return limit
        rule = "must be at least 1, or -1 for what the model takes"
        return check_integer("truncate_prompt_tokens", limit, 1, MAX_COUNT, rule)


class EmbeddingsRequest(PoolingFields, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    normalize: bool | None = None
    input_type: str | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """Body of `POST /v1/rerank`, in the form of Jina and Cohere."""

    query: str
    documents: Documents
    top_n: CountOrNone | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    max_tokens_per_doc: Count | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of `POST /v1/score`: pairs in the forms of vLLM, or items whose next token is judged, in that of SGLang."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    instruction: str | None = None
    query: Prompts | None = None
    items: Prompts | None = None
    label_token_ids: list[TokenId] | None = None
    labels: list[str] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """Body of `POST /classify`."""

    input: Prompts
    add_special_tokens: bool | None = None


class PoolingRequest(ClassifyRequest, kw_only=True):
    """Body of `POST /pooling`."""

    task: Literal["embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    normalize: bool | None = None


_NOT_YET: Final[dict[str, tuple[Any, ...]]] = {
    "additional_data": (),
    "chat_template": (),
    "messages": (),
    "mm_processor_kwargs": (),
    "softmax": (True,),
    "activation": (),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}

EMBEDDINGS_POLICY: Final = FieldPolicy(
    EmbeddingsRequest,
    _NOT_YET | {"embedding_types": (["float"],), "late_chunking": (False,)},
    no_effect=NO_EFFECT,
)
RERANK_POLICY: Final = FieldPolicy(
    RerankRequest, _NOT_YET | {"rank_fields": (), "max_chunks_per_doc": ()}, no_effect=NO_EFFECT
)
SCORE_POLICY: Final = FieldPolicy(ScoreRequest, _NOT_YET, no_effect=NO_EFFECT)
CLASSIFY_POLICY: Final = FieldPolicy(ClassifyRequest, _NOT_YET, no_effect=NO_EFFECT)
POOLING_POLICY: Final = FieldPolicy(PoolingRequest, _NOT_YET, no_effect=NO_EFFECT)


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


class Classification(msgspec.Struct):
    """The labels of one input; `label` is the likeliest one, null if the model's files have no names."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationsBody(msgspec.Struct, kw_only=True):
    """The labels, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    warnings: Warnings = UNSET


class PooledData(msgspec.Struct):
    """The vector or the scores of one input: numbers, or base64 of their little-endian float32."""

    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PooledBody(msgspec.Struct, kw_only=True):
    """The vectors or scores, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: PoolingUsage
    warnings: Warnings = UNSET
