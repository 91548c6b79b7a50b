"""Whether the served model can do what a pooling request asks for, and the prompts and parameters of its vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from ...models.spec.encoder_spec import PoolingSpec
from ...models.spec.model_spec import ModelSpec
from ...runtime.errors import RequestError
from ...runtime.pooling import PoolingKind, PoolingParams
from ...runtime.request_checks import shown
from ...runtime.sampling_params import SamplingParams
from ..generation import Prompt

Want = Literal["generate", "embed", "score", "labels"]

POOLING_SAMPLING: Final = SamplingParams(temperature=0.0, max_new_tokens=1, seed=0)
"""Sampling of pooling requests, which sample nothing; the result takes the place of one token."""
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
    if instruction and "{instruction}" not in pooling.template:
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


_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "query": ("query",),
    "search_query": ("query",),
    "document": ("document", "passage", "corpus"),
    "search_document": ("document", "passage", "corpus"),
    "passage": ("passage", "document", "corpus"),
}
"""Input types (Cohere, Voyage, NVIDIA), and the names of their prompts in the order in which they are looked for, as
in sentence-transformers' `encode_query` and `encode_document`."""


def embedding_params(
    pooling: PoolingSpec,
    *,
    dimensions: int | None = None,
    normalize: bool | None = None,
    param: str = "dimensions",
) -> PoolingParams:
    """The parameters of a vector.

    Args:
        dimensions: numbers of the vector; None: all.
        normalize: scale it to length 1; None: as the model's files say.
        param: the field that errors name.

    Raises:
        RequestError: the model was not trained for vectors of this size.
    """
    wanted = pooling.default_dimensions
    if dimensions is not None and dimensions == pooling.size:
        wanted = 0
    elif dimensions is not None:
        if dimensions < 1 or dimensions > pooling.size:
            raise RequestError(
                f"{param} is {dimensions}, but the model's vectors have {pooling.size} numbers; send at most that, or "
                "leave it out",
                param=param,
                code="invalid_value",
            )
        if not (pooling.any_dimensions or dimensions in pooling.dimensions):
            if pooling.dimensions:
                known = ", ".join(map(str, sorted({*pooling.dimensions, pooling.size})))
                rule = f"the model was trained for {known}; send one of these"
            else:
                rule = (
                    f"the model was trained for vectors of {pooling.size} numbers only; leave it out, or start the "
                    "server with --matryoshka to cut them anyway"
                )
            raise RequestError(f"{param} is {dimensions}, but {rule}", param=param, code="invalid_value")
        wanted = dimensions
    return PoolingParams(
        all_tokens=pooling.pooling != "last",
        dimensions=wanted,
        normalize=pooling.normalize if normalize is None else normalize,
    )


def prompt_text(
    pooling: PoolingSpec, *, prompt_name: str | None = None, input_type: str | None = None
) -> str:
    """The text before each input: that of the named prompt, of the input type, or of the default prompt; may be "".

    An input type without a prompt of its own has the default one, as in sentence-transformers.

    Raises:
        RequestError: the model has no such prompt, or the type is unknown.
    """
    prompts = pooling.prompts
    if prompt_name:
        if prompt_name not in prompts:
            if prompts:
                rule = f"the model's prompts are: {', '.join(sorted(prompts))}; send one of these, or put"
            else:
                rule = "the model has no prompts; leave it out, or put"
            raise RequestError(
                f"prompt_name is {shown(prompt_name)}, but {rule} the text before the input",
                param="prompt_name",
                code="invalid_value",
            )
        return prompts[prompt_name]
    default = prompts.get(pooling.default_prompt, "")
    if not input_type:
        return default
    if input_type in prompts:
        return prompts[input_type]
    if input_type not in _TYPES:
        known = ", ".join(sorted({*prompts, *_TYPES}))
        raise RequestError(
            f"input_type is {shown(input_type)}, but it must be one of: {known}",
            param="input_type",
            code="invalid_value",
        )
    return next((prompts[name] for name in _TYPES[input_type] if name in prompts), default)


def with_prompt(prompts: Sequence[Prompt], text: str, asked: str = "") -> list[Prompt]:
    """The inputs with a text before each; token ids are as they are.

    Args:
        asked: the field that asks for the text; "": it is the default.

    Raises:
        RequestError: an input is token ids, and the request asks for the text.
    """
    if not text:
        return list(prompts)
    if asked and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(
            f"{asked} asks for a text before each input, but inputs are token ids; send texts, or put its "
            f"tokens before them and leave {asked} out",
            param=asked,
            code="invalid_value",
        )
    return [text + prompt if isinstance(prompt, str) else prompt for prompt in prompts]
