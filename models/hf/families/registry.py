"""`FAMILIES`: the reader of each `model_type` that has a model of the engine's own.

A reader returns the fields of `ModelSpec` that its family adds or changes. A feature that changes the computation and
is not implemented is refused by name.
"""

from __future__ import annotations

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
    mixtral,
    nemotron,
    olmo,
    phi,
    qwen,
    seed,
    smollm,
    starcoder,
)
from .family import Family

FAMILIES: Final[dict[str, Family]] = {
    **llama.FAMILIES,
    **llama4.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **gemma_streams.FAMILIES,
    **phi.FAMILIES,
    **lfm.FAMILIES,
    **deepseek.FAMILIES,
    **mixtral.FAMILIES,
    **gpt_oss.FAMILIES,
    **smollm.FAMILIES,
    **olmo.FAMILIES,
    **ministral.FAMILIES,
    **glm.FAMILIES,
    **starcoder.FAMILIES,
    **cohere.FAMILIES,
    **exaone.FAMILIES,
    **seed.FAMILIES,
    **ernie.FAMILIES,
    **granite.FAMILIES,
    **nemotron.FAMILIES,
}
