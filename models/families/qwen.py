"""Qwen2, Qwen3, Qwen3-Next and Qwen3.5, dense and as mixtures of experts; MiMo, which is a Qwen2."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import QK_NORMS, AttentionForm, Biases, LayerForm, ModuleNames, WindowsSpec
from ..spec.model_spec import FilesSpec
from ..spec.mtp_spec import QWEN_MTP, MTPSpec, mtp_after
from ..spec.quantization import BLOCK_LEN
from ..spec.state_spec import DeltaSpec, StateSpec
from .family import GGUF, LAYER_NAMES, QK_NORM_NAMES, Facts, Family
from .gguf_readers import mixture_of, no_facts
from .hf_readers import layer_types, partial_rope_facts, rope_facts, window_everywhere
from .hf_rope import MAX_POSITIONS, read_rope

_SHARED_NAMES: Final = ExpertNames(shared="shared_expert")
_MAX_TAPS: Final = 64
_DELTA_HEAD_DIM: Final = 256


def _qwen2(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | _qwen_windows(fields) | {"biases": Biases(qkv=True)}


def _mimo(fields: Fields) -> Facts:
    further = fields.integer("num_nextn_predict_layers", 0, 1 << 8, default=1)
    return _qwen2(fields) | {"files": FilesSpec(num_mtp_layers=further)}


def _qwen3(fields: Fields) -> Facts:
    return _qwen3_attention(fields) | _qwen_windows(fields)


def _qwen2_moe(fields: Fields) -> Facts:
    experts = _shared_experts(fields, default_size=5632)
    windows = _qwen2_moe_windows(fields) if fields.boolean("use_sliding_window", default=False) else {}
    return (
        rope_facts(fields, read_rope(fields))
        | windows
        | {"biases": Biases(qkv=fields.boolean("qkv_bias", default=True)), "experts": experts}
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
    size = fields.integer("sliding_window", 1, MAX_POSITIONS)
    return {"windows": WindowsSpec(size=size, layers=windowed)}


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
        "biases": Biases(qkv=bias, attention_out=bias),
        "form": QK_NORMS,
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
    size = fields.integer("sliding_window", 1, MAX_POSITIONS)
    return {"windows": WindowsSpec(size=size, layers=windowed)}


_DELTA_KINDS: Final = ("linear_attention", "full_attention")
DELTA_FORM: Final = LayerForm(
    qk_norm=True, norm="offset_rms", float32_norms=True, names=ModuleNames(mtp="mtp.")
)


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
        "biases": Biases(qkv=bias, attention_out=bias),
        "form": DELTA_FORM,
        "attention": AttentionForm(output_gate=True),
        "state": state if any(state.layers) else None,
        "mtp": _mtp(fields),
    }


def _mtp(fields: Fields) -> MTPSpec | None:
    """The layer that predicts further tokens, if it shares the embedding; files without its tensors have none."""
    num_layers = fields.integer("mtp_num_hidden_layers", 0, 1 << 8, default=1)
    has_own = fields.boolean("mtp_use_dedicated_embeddings", default=False)
    return QWEN_MTP if num_layers and not has_own else None


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


def _qwen3_gguf(fields: Fields, arch: str) -> Facts:
    return {"form": QK_NORMS}


def _qwen3_moe_gguf(fields: Fields, arch: str) -> Facts:
    return {"form": QK_NORMS, "experts": mixture_of(fields, arch, ExpertNames())}  # always normalized


def _qwen2_moe_gguf(fields: Fields, arch: str) -> Facts:
    experts = structs.replace(
        mixture_of(fields, arch, ExpertNames(shared="shared_expert"), normalize=False),
        shared_size=fields.integer(f"{arch}.expert_shared_feed_forward_length", 1, 1 << 22),
        has_shared_gate=True,
    )
    return {"experts": experts}


def _qwen3_next_gguf(fields: Fields, arch: str) -> Facts:
    return _delta_nets_gguf(fields, arch, fused_small=True) | {"experts": _shared_experts_gguf(fields, arch)}


def _qwen3_5_gguf(fields: Fields, arch: str) -> Facts:
    return _delta_nets_gguf(fields, arch)


def _qwen3_5_moe_gguf(fields: Fields, arch: str) -> Facts:
    """The file has no width of dense MLPs, as there are none."""
    experts = _shared_experts_gguf(fields, arch)
    return _delta_nets_gguf(fields, arch) | {
        "experts": experts,
        "intermediate_size": experts.intermediate_size,
    }


def _shared_experts_gguf(fields: Fields, arch: str) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=fields.integer(f"{arch}.expert_count", 1, 1 << 16),
        intermediate_size=fields.integer(f"{arch}.expert_feed_forward_length", 1, 1 << 22),
        routing=Routing(num_active=fields.integer(f"{arch}.expert_used_count", 1, 1 << 16)),
        shared_size=fields.integer(f"{arch}.expert_shared_feed_forward_length", 1, 1 << 22),
        has_shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )


def _delta_nets_gguf(fields: Fields, arch: str, *, fused_small: bool = False) -> Facts:
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
        "files": FilesSpec(num_mtp_layers=further),
        "mtp": mtp_after(num_layers, feeds_normed=True) if further else None,
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


FAMILIES: Final = (
    Family(
        "qwen2",
        structure="llama",
        published="Qwen2, Qwen2.5, QwQ",
        architecture="Qwen2ForCausalLM",
        read=_qwen2,
        gguf={"qwen2": GGUF(no_facts), "qwen2vl": GGUF(no_facts)},
    ),
    Family(
        "mimo",
        structure="llama",
        published="MiMo-7B-Base, SFT and RL",
        architecture="MiMoForCausalLM",
        read=_mimo,
    ),
    Family(
        "qwen3",
        structure="llama",
        published="Qwen3",
        architecture="Qwen3ForCausalLM",
        read=_qwen3,
        head_dim=128,
        gguf={"qwen3": GGUF(_qwen3_gguf, _QWEN3_NAMES), "qwen3vl": GGUF(_qwen3_gguf, _QWEN3_NAMES)},
    ),
    Family(
        "qwen2_moe",
        structure="llama",
        published="Qwen1.5-MoE, Qwen2-57B-A14B",
        architecture="Qwen2MoeForCausalLM",
        read=_qwen2_moe,
        gguf={"qwen2moe": GGUF(_qwen2_moe_gguf, has_experts=True)},
    ),
    Family(
        "qwen3_moe",
        structure="llama",
        published="Qwen3-30B-A3B, Qwen3-Coder",
        architecture="Qwen3MoeForCausalLM",
        read=_qwen3_moe,
        gguf={"qwen3moe": GGUF(_qwen3_moe_gguf, _QWEN3_NAMES, has_experts=True)},
    ),
    Family(
        "qwen3_next",
        structure="hybrid",
        published="Qwen3-Next-80B-A3B",
        architecture="Qwen3NextForCausalLM",
        read=_qwen3_next,
        head_dim=_DELTA_HEAD_DIM,
        gguf={
            "qwen3next": GGUF(
                _qwen3_next_gguf, _DELTA_NAMES, partial_rotary=True, has_experts=True, offset_norms=True
            )
        },
    ),
    Family(
        "qwen3_5_text",
        structure="hybrid",
        published="Qwen3.5-9B, 27B and other sizes without experts",
        architecture="Qwen3_5ForCausalLM",
        read=_qwen3_5,
        head_dim=_DELTA_HEAD_DIM,
        body="Qwen3_5TextModel",
        gguf={
            "qwen35": GGUF(
                _qwen3_5_gguf, _DELTA_NAMES, partial_rotary=True, offset_norms=True, tiled_values=True
            )
        },
    ),
    Family(
        "qwen3_5_moe_text",
        structure="hybrid",
        published="Qwen3.5-35B-A3B and other sizes with experts",
        architecture="Qwen3_5MoeForCausalLM",
        read=_qwen3_5_moe,
        head_dim=_DELTA_HEAD_DIM,
        body="Qwen3_5MoeTextModel",
        gguf={
            "qwen35moe": GGUF(
                _qwen3_5_moe_gguf,
                _DELTA_NAMES,
                partial_rotary=True,
                has_experts=True,
                offset_norms=True,
                tiled_values=True,
            )
        },
    ),
)
