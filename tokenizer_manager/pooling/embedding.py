"""Embedding requests: the prompt before each text, and the parameters of the vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...models.spec.pooling_spec import PoolingSpec
from ...runtime.errors import RequestError
from ...runtime.pooling import PoolingParams
from ...runtime.request_checks import shown
from ..generation import Prompt

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
