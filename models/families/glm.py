"""GLM-4: `glm` (in GGUF `chatglm`) is that of 2024, `glm4` that of 2025, with norms after the blocks, too; GLM-4.5."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import structs

from ..fields import Fields
from ..spec.layer_form import GLM4, PRE_NORMS, QK_NORMS, Biases, LayerForm
from ..spec.model_spec import FilesSpec
from ..spec.mtp_spec import mtp_after
from .deepseek import (
    SIGMOID,
    experts_after,
    experts_after_gguf,
    first_layers,
    sigmoid_routing,
    with_mtp,
)
from .family import GGUF, LAYER_NAMES, QK_NORM_NAMES, Facts, Family
from .hf_readers import partial_rope_facts
from .hf_rope import read_rope

if TYPE_CHECKING:
    from ..gguf.gguf_file import GGUFFile

_HEAD_DIM: Final = 128


def _glm(fields: Fields) -> Facts:
    return _layers(fields, structs.replace(GLM4, norms=LayerForm().norms))


def _glm4(fields: Fields) -> Facts:
    return _layers(fields, GLM4)


def _layers(fields: Fields, form: LayerForm) -> Facts:
    rope = read_rope(fields, default_partial=0.5)
    return partial_rope_facts(fields, rope, _HEAD_DIM) | {
        "biases": Biases(qkv=fields.boolean("attention_bias", default=True)),
        "form": form,
    }


def _glm4_moe(fields: Fields) -> Facts:
    routing = partial(sigmoid_routing, num_groups=1, num_active_groups=1, scale=1.0)
    return (
        partial_rope_facts(fields, read_rope(fields, default_partial=0.5))
        | experts_after(fields, first_layers(fields, default=1), routing, num_shared=1)
        | with_mtp(fields)
        | {
            "biases": Biases(qkv=fields.boolean("attention_bias", default=False)),
            "form": structs.replace(PRE_NORMS, qk_norm=fields.boolean("use_qk_norm", default=False)),
        }
    )


def _glm4_gguf(fields: Fields, arch: str) -> Facts:
    return {"form": GLM4}


def _chatglm(fields: Fields, arch: str) -> Facts:
    return {"form": structs.replace(GLM4, norms=PRE_NORMS.norms)}


def _glm4_moe_gguf(fields: Fields, arch: str) -> Facts:
    """Layers that predict further tokens count as blocks of the file."""
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    num_layers = fields.integer(f"{arch}.block_count", further + 1, 1 << 12) - further
    facts = {"num_layers": num_layers, "files": FilesSpec(num_mtp_layers=further), "form": QK_NORMS}
    facts["mtp"] = mtp_after(num_layers) if further else None
    return facts | experts_after_gguf(fields, arch, SIGMOID)


def _of_glm4_moe_tensors(file: GGUFFile, facts: Facts) -> Facts:
    """Only the tensors show whether heads have norms."""
    has_norms = "blk.0.attn_q_norm.weight" in file.tensors
    return facts | {"form": structs.replace(facts["form"], qk_norm=has_norms)}


_FUSED_MLP: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if stored not in ("ffn_gate", "ffn_up")},
    "mlp.gate_up_proj": "ffn_up",
}
_NAMES: Final = {
    **_FUSED_MLP,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_MOE_NAMES: Final = {**LAYER_NAMES, **QK_NORM_NAMES, "post_attention_layernorm": "post_attention_norm"}
_CHATGLM_NAMES: Final = {
    **_FUSED_MLP,
    "self_attn.qkv_proj": "attn_qkv",
}  # of the first releases; later ones have three


FAMILIES: Final = (
    Family(
        "glm",
        structure="llama",
        published="GLM-4-9B",
        architecture="GlmForCausalLM",
        read=_glm,
        head_dim=_HEAD_DIM,
        gguf={"chatglm": GGUF(_chatglm, _CHATGLM_NAMES, partial_rotary=True)},
    ),
    Family(
        "glm4",
        structure="sandwich",
        published="GLM-4-0414, GLM-Z1",
        architecture="Glm4ForCausalLM",
        read=_glm4,
        head_dim=_HEAD_DIM,
        gguf={"glm4": GGUF(_glm4_gguf, _NAMES, partial_rotary=True)},
    ),
    Family(
        "glm4_moe",
        structure="llama",
        published="GLM-4.5, GLM-4.5-Air, GLM-4.6",
        architecture="Glm4MoeForCausalLM",
        read=_glm4_moe,
        gguf={
            "glm4moe": GGUF(
                _glm4_moe_gguf,
                _MOE_NAMES,
                partial_rotary=True,
                has_experts=True,
                of_tensors=_of_glm4_moe_tensors,
            )
        },
    ),
)
