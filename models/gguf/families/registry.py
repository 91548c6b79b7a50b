"""`GGUF_FAMILIES`: the reader of each GGUF architecture, and the names of tensors by Hugging Face's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import (
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    gemma_streams,
    glm,
    gpt_oss,
    granite,
    lfm,
    llama,
    llama4,
    ministral,
    nemotron,
    olmo,
    phi,
    qwen,
    seed,
    smollm,
    starcoder,
)
from .family import LAYER_NAMES, GGUFFamily

GGUF_FAMILIES: Final[dict[str, GGUFFamily]] = {
    **llama.FAMILIES,
    **llama4.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **gemma_streams.FAMILIES,
    **phi.FAMILIES,
    **smollm.FAMILIES,
    **olmo.FAMILIES,
    **ministral.FAMILIES,
    **glm.FAMILIES,
    **gpt_oss.FAMILIES,
    **lfm.FAMILIES,
    **starcoder.FAMILIES,
    **cohere.FAMILIES,
    **exaone.FAMILIES,
    **seed.FAMILIES,
    **ernie.FAMILIES,
    **granite.FAMILIES,
    **nemotron.FAMILIES,
    **deepseek.FAMILIES,
}

_BY_MODEL_TYPE: Final = {
    model_type: family
    for family in GGUF_FAMILIES.values()
    for model_type in (family.model_type, *family.also)
}


def family_of(model_type: str) -> GGUFFamily | None:
    """The family whose files hold models of this `model_type`; None: there is none."""
    return _BY_MODEL_TYPE.get(model_type)


def layer_names(model_type: str) -> Mapping[str, str]:
    """Modules of a layer of this `model_type`, and their names in a file; Llama's if there is no such file."""
    family = family_of(model_type)
    return LAYER_NAMES if family is None else family.names
