"""DeepSeek-V2, V3, Kimi K2 and GLM-4.7-Flash: one architecture in GGUF, with latent attention.

Files from before May 2025 name the heads' sizes `key_length` and `value_length`; in newer ones these are the sizes of a
row of the KV pool, and those of heads end with `_mla`.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.experts_spec import ExpertNames
from ...spec.latent_spec import LatentSpec
from ...spec.layer_form import PRE_NORMS
from ...spec.model_spec import RopeScaling
from ..gguf_rope import yarn_scaling
from .family import LAYER_NAMES, Facts, GGUFFamily
from .mixtral import mixture_of

_MAX_SIZE: Final = 1 << 14
_SOFTMAX, SIGMOID = 1, 2


def _deepseek2(fields: Fields, arch: str) -> Facts:
    heads = f"{arch}.attention"
    end = "" if fields.get(f"{heads}.key_length_mla") is None else "_mla"
    rotary_dim = fields.integer(f"{arch}.rope.dimension_count", 1, _MAX_SIZE)
    q_rank = fields.integer(f"{heads}.q_lora_rank", 0, _MAX_SIZE, default=0)
    latent = LatentSpec(
        q_lora_rank=q_rank or None,
        kv_lora_rank=fields.integer(f"{heads}.kv_lora_rank", 1, _MAX_SIZE),
        qk_nope_head_dim=fields.integer(f"{heads}.key_length{end}", rotary_dim + 1, 2 * _MAX_SIZE)
        - rotary_dim,
        qk_rope_head_dim=rotary_dim,
        v_head_dim=fields.integer(f"{heads}.value_length{end}", 1, _MAX_SIZE),
    )
    scaling, mscale = _rope(fields, arch)
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.row_size,
        "rotary_dim": rotary_dim,
        "rope_scaling": scaling,
        "query_scale": mscale**2 * latent.qk_head_dim**-0.5,
        "form": structs.replace(PRE_NORMS, interleaved_rope=True),
        **experts_after(fields, arch),
    }


def experts_after(fields: Fields, arch: str, default: int = _SOFTMAX) -> Facts:
    """Experts after the first dense layers; `default`: the kind of scores of older files, which do not name it."""
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) == 0:
        return {}
    gating = fields.integer(f"{arch}.expert_gating_func", 0, 1 << 8, default=0)
    if gating not in (_SOFTMAX, SIGMOID, 0):
        raise fields.error(
            f"{arch}.expert_gating_func", gating, f"supported are: {_SOFTMAX} (softmax), {SIGMOID} (sigmoid)"
        )
    is_sigmoid = (gating or default) == SIGMOID
    num_groups = fields.integer(f"{arch}.expert_group_count", 0, 1 << 12, default=0) or 1
    experts = mixture_of(fields, arch, ExpertNames())
    dense = fields.integer(f"{arch}.leading_dense_block_count", 0, 1 << 12, default=0)
    routing = structs.replace(
        experts.routing,
        normalize=fields.boolean(f"{arch}.expert_weights_norm", default=False),
        scores="sigmoid" if is_sigmoid else "softmax",
        has_bias=is_sigmoid,
        num_groups=num_groups,
        num_active_groups=fields.integer(f"{arch}.expert_group_used_count", 0, 1 << 12, default=0)
        or num_groups,
        group_best=2 if is_sigmoid else 1,
        scale=fields.number(f"{arch}.expert_weights_scale", 0.0, 1e6, default=1.0) or 1.0,
        float32_logits=True,
    )
    shared = fields.integer(f"{arch}.expert_shared_count", 0, 1 << 8, default=0)
    return {
        "experts": structs.replace(
            experts,
            routing=routing,
            dense_layers=tuple(range(dense)),
            shared_size=shared * experts.intermediate_size,
        )
    }


def _rope(fields: Fields, arch: str) -> tuple[RopeScaling, float]:
    """The scaling, and yarn's factor of whole queries and keys: llama.cpp cancels the one of cos and sin instead."""
    key = f"{arch}.rope.scaling"
    kind = fields.text(f"{key}.type", default="none")
    if kind == "none":
        return RopeScaling(), 1.0
    if kind != "yarn":
        raise fields.error(f"{key}.type", kind, "which is not supported; supported are: none, yarn")
    scaling = structs.replace(yarn_scaling(fields, arch), attention_factor=1.0)
    multiplier = fields.number(f"{key}.yarn_log_multiplier", 0.0, 1e3, default=0.0)
    return scaling, 1.0 + multiplier * math.log(scaling.factor)


_NAMES: Final = {
    **LAYER_NAMES,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "deepseek2": GGUFFamily("deepseek_v2", _deepseek2, _NAMES, has_experts=True, has_own_heads=True),
}
