"""Qwen2, Qwen3, Qwen3-Next and Qwen3.5, dense and as mixtures of experts."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...hf.families.qwen import DELTA_FORM
from ...spec.attention_form import AttentionForm
from ...spec.block_forms import BLOCK_LEN
from ...spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ...spec.state_spec import DeltaSpec, StateSpec
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily, no_facts
from .mixtral import mixture_of


def _qwen3(fields: Fields, arch: str) -> Facts:
    return {"qk_norm": True}


def _qwen3_moe(fields: Fields, arch: str) -> Facts:
    return {"qk_norm": True, "experts": mixture_of(fields, arch, ExpertNames())}  # always normalized


def _qwen2_moe(fields: Fields, arch: str) -> Facts:
    experts = structs.replace(
        mixture_of(fields, arch, ExpertNames(shared="shared_expert"), normalize=False),
        shared_size=fields.integer(f"{arch}.expert_shared_feed_forward_length", 1, 1 << 22),
        has_shared_gate=True,
    )
    return {"experts": experts}


def _qwen3_next(fields: Fields, arch: str) -> Facts:
    return _delta_nets(fields, arch, fused_small=True) | {"experts": _shared_experts(fields, arch)}


def _qwen3_5(fields: Fields, arch: str) -> Facts:
    return _delta_nets(fields, arch)


def _qwen3_5_moe(fields: Fields, arch: str) -> Facts:
    """The file has no width of dense MLPs, as there are none."""
    experts = _shared_experts(fields, arch)
    return _delta_nets(fields, arch) | {"experts": experts, "intermediate_size": experts.intermediate_size}


def _shared_experts(fields: Fields, arch: str) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=fields.integer(f"{arch}.expert_count", 1, 1 << 16),
        intermediate_size=fields.integer(f"{arch}.expert_feed_forward_length", 1, 1 << 22),
        routing=Routing(num_active=fields.integer(f"{arch}.expert_used_count", 1, 1 << 16)),
        shared_size=fields.integer(f"{arch}.expert_shared_feed_forward_length", 1, 1 << 22),
        has_shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )


def _delta_nets(fields: Fields, arch: str, *, fused_small: bool = False) -> Facts:
    """As of the folder; layers that predict further tokens are counted with the others."""
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    num_layers = fields.integer(f"{arch}.block_count", further + 1, 1 << 12) - further
    interval = fields.integer(f"{arch}.full_attention_interval", 1, 1 << 12, default=4)
    num_heads = fields.integer(f"{arch}.ssm.time_step_rank", 1, 1 << 12)
    key = f"{arch}.ssm.inner_size"
    value_size = fields.integer(key, num_heads, 1 << 24)
    if value_size % (num_heads * BLOCK_LEN):
        rule = f"expected {num_heads} heads of a multiple of {BLOCK_LEN}: blocks of weights cannot be split"
        raise fields.error(key, value_size, rule)
    delta = DeltaSpec(
        num_key_heads=fields.integer(f"{arch}.ssm.group_count", 1, num_heads),
        num_value_heads=num_heads,
        key_dim=fields.integer(f"{arch}.ssm.state_size", 1, 1 << 12),
        value_dim=value_size // num_heads,
        fused_small=fused_small,
    )
    state = StateSpec(
        layers=tuple((layer + 1) % interval != 0 for layer in range(num_layers)),
        conv_size=delta.conv_size,
        conv_taps=fields.integer(f"{arch}.ssm.conv_kernel", 2, 64),
        delta=delta,
    )
    return {
        "num_layers": num_layers,
        "num_mtp_layers": further,
        "qk_norm": True,
        "float32_norms": True,
        "form": DELTA_FORM,
        "attention": AttentionForm(output_gate=True),
        "state": state if any(state.layers) else None,
    }


_QWEN3_NAMES: Final = {**LAYER_NAMES, **QK_NORM_NAMES}
_DELTA_NAMES: Final = {
    **_QWEN3_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "qwen2": GGUFFamily("qwen2", no_facts),
    "qwen3": GGUFFamily("qwen3", _qwen3, _QWEN3_NAMES),
    # Of multimodal models, whose tower is a file of its own; for text their M-RoPE is the rope of the others.
    "qwen2vl": GGUFFamily("qwen2", no_facts),
    "qwen3vl": GGUFFamily("qwen3", _qwen3, _QWEN3_NAMES),
    "qwen2moe": GGUFFamily("qwen2_moe", _qwen2_moe, has_experts=True),
    "qwen3moe": GGUFFamily("qwen3_moe", _qwen3_moe, _QWEN3_NAMES, has_experts=True),
    "qwen3next": GGUFFamily(
        "qwen3_next", _qwen3_next, _DELTA_NAMES, partial_rotary=True, has_experts=True, offset_norms=True
    ),
    "qwen35": GGUFFamily(
        "qwen3_5_text", _qwen3_5, _DELTA_NAMES, partial_rotary=True, offset_norms=True, tiled_values=True
    ),
    "qwen35moe": GGUFFamily(
        "qwen3_5_moe_text",
        _qwen3_5_moe,
        _DELTA_NAMES,
        partial_rotary=True,
        has_experts=True,
        offset_norms=True,
        tiled_values=True,
    ),
}
