"""`check_task`: whether the served model can do what a request asks for, with the fix if it cannot."""

from __future__ import annotations

from typing import Final, Literal

from ...models.spec.model_spec import ModelSpec
from ...models.spec.pooling_spec import PoolingSpec
from ...runtime.errors import RequestError
from ...runtime.pooling import PoolingKind, PoolingParams
from ...runtime.sampling_params import SamplingParams

Want = Literal["generate", "embed", "score", "labels"]

POOLING_SAMPLING: Final = SamplingParams(temperature=0.0, max_new_tokens=1, seed=0)
"""Of pooling requests, which sample nothing; the result takes the place of one token."""
PROBE: Final = PoolingParams(normalize=True)
_ENDPOINTS: Final = {"embed": "/v1/embeddings", "score": "/v1/rerank or /v1/score"}
_NAMES: Final = {"embed": "makes vectors of texts", "score": "scores texts"}
_WANTED: Final = {
    "generate": "generates no text",
    "embed": "makes no vectors",
    "score": "has no scores",
    "labels": "has no next token to score",
}


def check_task(spec: ModelSpec, wanted: Want) -> None:
    """Refuse a request for what the model cannot do.

    Raises:
        RequestError: 400, with what the model can do.
    """
    task = "generate" if spec.pooling is None else spec.pooling.task
    if wanted in (task, "labels" if task == "generate" else task):
        return
    if wanted == "score" and task == "embed":  # by the angle between vectors
        return
    if task == "generate":
        what = f"this model generates text and {_WANTED[wanted]}"
        fix = (
            "serve a model for it, or start the server with --task embed"
            if wanted == "embed"
            else "serve a reranker"
        )
    else:
        what = f"this model {_NAMES[task]} and {_WANTED[wanted]}"
        fix = f"use {_ENDPOINTS[task]}, or serve another model"
    raise RequestError(f"{what}; {fix}", code="unsupported_task")


def check_ranking(spec: ModelSpec, instead: str) -> None:
    """Refuse to order documents by a model that has several scores for each.

    Args:
        instead: what gives all scores.

    Raises:
        RequestError: it has.
    """
    check_task(spec, "score")
    assert spec.pooling is not None
    if spec.pooling.task == "score" and spec.pooling.size > 1:
        raise RequestError(
            f"this model has {spec.pooling.size} scores for a pair, and documents are ordered by one; use {instead}",
            code="unsupported_task",
        )


def check_instruction(pooling: PoolingSpec, instruction: str | None) -> None:
    """Refuse an instruction that would have no effect.

    Raises:
        RequestError: the model takes none.
    """
    if instruction and not pooling.template:
        raise RequestError(
            "instruction is not supported by this model, whose prompts have none; leave it out",
            param="instruction",
            code="invalid_value",
        )


def probe_of(spec: ModelSpec) -> PoolingParams | None:
    """The smallest pooling request, for health checks; None for a model that generates text."""
    if spec.pooling is None:
        return None
    if spec.pooling.label_tokens:
        return PoolingParams(PoolingKind.LABELS, label_ids=(0,))
    all_tokens = spec.pooling.pooling != "last"
    kind = PoolingKind.EMBED if spec.pooling.task == "embed" else PoolingKind.SCORE
    return PoolingParams(kind, all_tokens=all_tokens)
