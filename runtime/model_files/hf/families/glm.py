"""GLM-4: `glm` is that of 2024, `glm4` that of 2025, with norms on both sides of attention and MLP."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...layer_form import GLM4, LayerForm
from ..hf_rope import read_rope
from .family import Facts, Family, partial_rope_facts

_HEAD_DIM: Final = 128


def _glm(fields: Fields) -> Facts:
    return _layers(fields, structs.replace(GLM4, norms=LayerForm().norms))


def _glm4(fields: Fields) -> Facts:
    return _layers(fields, GLM4)


def _layers(fields: Fields, form: LayerForm) -> Facts:
    rope = read_rope(fields, default_partial=0.5)
    return partial_rope_facts(fields, rope, _HEAD_DIM) | {
        "attention_bias": fields.boolean("attention_bias", default=True),
        "form": form,
    }


FAMILIES: Final[dict[str, Family]] = {
    "glm": Family("GlmForCausalLM", _glm, head_dim=_HEAD_DIM),
    "glm4": Family("Glm4ForCausalLM", _glm4, head_dim=_HEAD_DIM),
}
