"""Qwen2, Qwen3, Qwen3-Next and Qwen3.5, dense and as mixtures of experts."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.attention_form import AttentionForm
from ...spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ...spec.layer_form import LayerForm, ModuleNames
from ...spec.state_spec import DeltaSpec, StateSpec
from ..hf_rope import MAX_POSITIONS, read_rope
from .family import Facts, Family, layer_types, partial_rope_facts, rope_facts, window_everywhere

_SHARED_NAMES: Final = ExpertNames(shared="shared_expert")
_MAX_TAPS: Final = 64
_DELTA_HEAD_DIM: Final = 256


def _qwen2(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | _qwen_windows(fields) | {"attention_bias": True}


def _qwen3(fields: Fields) -> Facts:
    return _qwen3_attention(fields) | _qwen_windows(fields)


def _qwen2_moe(fields: Fields) -> Facts:
    experts = _shared_experts(fields, default_size=5632)
    windows = _qwen2_moe_windows(fields) if fields.boolean("use_sliding_window", default=False) else {}
    return (
        rope_facts(fields, read_rope(fields))
        | windows
        | {"attention_bias": fields.boolean("qkv_bias", default=True), "experts": experts}
    )


def _qwen2_moe_windows(fields: Fields) -> Facts:
    """Without `layer_types`, every other layer before `max_window_layers` has a window."""
    if fields.get("sliding_window") is None:
        return {}
    if fields.get("layer_types") is not None:
        windowed = layer_types(fields)
    else:
        last = fields.integer("max_window_layers", 0, 1 << 12, default=28)
        num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
        windowed = tuple(layer % 2 == 0 and layer < last for layer in range(num_layers))
    if not any(windowed):
        return {}
    return {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS),
        "windowed_layers": windowed,
    }


def _qwen3_moe(fields: Fields) -> Facts:
    windows = window_everywhere(fields) if fields.boolean("use_sliding_window", default=False) else {}
    return _qwen3_attention(fields) | windows | {"experts": _experts(fields)}


def _shared_experts(
    fields: Fields, *, default_size: int = 512, default_normalize: bool = False
) -> ExpertsSpec:
    return structs.replace(
        _experts(fields, default_normalize),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, 1 << 22, default=default_size),
        has_shared_gate=True,
        names=_SHARED_NAMES,
    )


def _experts(fields: Fields, default_normalize: bool = False) -> ExpertsSpec:
    name = fields.given("num_experts", "num_local_experts")
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    step = fields.integer("decoder_sparse_step", 1, 1 << 12, default=1)
    dense = set(fields.integers("mlp_only_layers", 0, 1 << 12))
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return ExpertsSpec(
        num_experts=fields.integer(name, 1, 1 << 16),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22),
        routing=Routing(
            num_active=fields.integer("num_experts_per_tok", 1, 1 << 16),
            normalize=fields.boolean("norm_topk_prob", default=default_normalize),
        ),
        dense_layers=tuple(sorted(layer for layer in dense if layer < num_layers)),
    )


def _qwen3_attention(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
    }


def _qwen_windows(fields: Fields) -> Facts:
    """Layers from `max_window_layers` on have a window, if windows are enabled."""
    if not fields.boolean("use_sliding_window", default=False) or fields.get("sliding_window") is None:
        return {}
    if fields.get("layer_types") is not None:
        windowed = layer_types(fields)
    else:
        first = fields.integer("max_window_layers", 0, 1 << 12, default=28)
        windowed = tuple(layer >= first for layer in range(fields.integer("num_hidden_layers", 1, 1 << 12)))
    if not any(windowed):
        return {}
    return {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS),
        "windowed_layers": windowed,
    }


_DELTA_KINDS: Final = ("linear_attention", "full_attention")
DELTA_FORM: Final = LayerForm(norm="offset_rms", names=ModuleNames(mtp="mtp."))


def _qwen3_next(fields: Fields) -> Facts:
    return _delta_nets(fields, fused=True) | {"experts": _shared_experts(fields, default_normalize=True)}


def _qwen3_5(fields: Fields) -> Facts:
    return _delta_nets(fields)


def _qwen3_5_moe(fields: Fields) -> Facts:
    """All layers have experts; the shares of a token are normalized, whatever the file says."""
    for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        value = fields.get(name)
        if value is not None and value not in (1, []):
            raise fields.error(name, value, "which the model does not have; remove it")
    experts = ExpertsSpec(
        num_experts=fields.integer("num_experts", 1, 1 << 16, default=256),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22, default=512),
        routing=Routing(num_active=fields.integer("num_experts_per_tok", 1, 1 << 16, default=8)),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, 1 << 22, default=512),
        has_shared_gate=True,
        names=_SHARED_NAMES,
    )
    # The file has no width of dense MLPs, as there are none.
    return _delta_nets(fields) | {"experts": experts, "intermediate_size": experts.intermediate_size}


def _delta_nets(fields: Fields, *, fused: bool = False) -> Facts:
    """Layers of gated delta nets, some of attention with an output gate; norms have weights around zero."""
    for name, only in (("attn_output_gate", True), ("mamba_ssm_dtype", "float32")):
        if fields.get(name) not in (None, only):
            raise fields.error(name, fields.get(name), f"only {str(only).lower()} is supported")
    delta = DeltaSpec(
        num_key_heads=fields.integer("linear_num_key_heads", 1, 1 << 12, default=16),
        num_value_heads=fields.integer("linear_num_value_heads", 1, 1 << 12, default=32),
        key_dim=fields.integer("linear_key_head_dim", 1, 1 << 12, default=128),
        value_dim=fields.integer("linear_value_head_dim", 1, 1 << 12, default=128),
        fused_large=fused,
        fused_small=fused,
    )
    state = StateSpec(
        layers=_delta_layers(fields),
        conv_size=delta.conv_size,
        conv_taps=fields.integer("linear_conv_kernel_dim", 2, _MAX_TAPS, default=4),
        delta=delta,
    )
    bias = fields.boolean("attention_bias", default=False)
    rope = read_rope(fields, default_partial=0.25)
    return partial_rope_facts(fields, rope, _DELTA_HEAD_DIM) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "float32_norms": True,
        "form": DELTA_FORM,
        "attention": AttentionForm(output_gate=True),
        "state": state if any(state.layers) else None,
    }


def _delta_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers are delta nets."""
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind not in _DELTA_KINDS for kind in kinds):
            raise fields.error("layer_types", kinds, f"expected a list of {' and '.join(_DELTA_KINDS)}")
        return tuple(kind == "linear_attention" for kind in kinds)
    interval = fields.integer("full_attention_interval", 1, 1 << 12, default=4)
    return tuple(
        (layer + 1) % interval != 0 for layer in range(fields.integer("num_hidden_layers", 1, 1 << 12))
    )


FAMILIES: Final[dict[str, Family]] = {
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, head_dim=128),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3_next": Family("Qwen3NextForCausalLM", _qwen3_next, head_dim=_DELTA_HEAD_DIM),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _qwen3_5, head_dim=_DELTA_HEAD_DIM, body="Qwen3_5TextModel"),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", _qwen3_5_moe, head_dim=_DELTA_HEAD_DIM, body="Qwen3_5MoeTextModel"
    ),
}
