"""GLM-4: `glm` is that of 2024, `glm4` that of 2025, with norms on both sides of attention and MLP; GLM-4.5."""

from __future__ import annotations

from functools import partial
from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.layer_form import GLM4, LayerForm
from ..hf_rope import read_rope
from .deepseek import experts_after, first_layers, further_layers, sigmoid_routing
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


def _glm4_moe(fields: Fields) -> Facts:
    routing = partial(sigmoid_routing, num_groups=1, num_active_groups=1, scale=1.0)
    return (
        partial_rope_facts(fields, read_rope(fields, default_partial=0.5))
        | experts_after(fields, first_layers(fields, default=1), routing, num_shared=1)
        | further_layers(fields)
        | {
            "attention_bias": fields.boolean("attention_bias", default=False),
            "qk_norm": fields.boolean("use_qk_norm", default=False),
        }
    )


FAMILIES: Final[dict[str, Family]] = {
    "glm": Family("GlmForCausalLM", _glm, head_dim=_HEAD_DIM),
    "glm4": Family("Glm4ForCausalLM", _glm4, head_dim=_HEAD_DIM),
    "glm4_moe": Family("Glm4MoeForCausalLM", _glm4_moe),
}
