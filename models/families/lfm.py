"""LFM2 and LFM2-MoE."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import LFM2_NAMES, ExpertsSpec, Routing
from ..spec.layer_form import LayerForm, ModuleNames
from ..spec.state_spec import StateSpec
from .family import GGUF, Facts, Family
from .gguf_readers import kv_heads, mixture_of
from .hf_readers import rope_facts
from .hf_rope import read_rope

LFM2_FORM: Final = LayerForm(
    norms=("operator_norm", "ffn_norm"),
    mlp_names=("w1", "w3", "w2"),
    qk_norm=True,
    names=ModuleNames(
        mlp="feed_forward",
        attention_out="out_proj",
        q_norm="q_layernorm",
        k_norm="k_layernorm",
        final_norm="embedding_norm",
    ),
)

_THETA: Final = 1000000.0
_MAX_TAPS: Final = 64
_KINDS: Final = ("full_attention", "conv")


def _lfm2(fields: Fields) -> Facts:
    return _body(fields) | {"intermediate_size": _mlp_width(fields)}


def _lfm2_moe(fields: Fields) -> Facts:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    num_dense = fields.integer("num_dense_layers", 0, 1 << 12, default=2)
    routing = Routing(
        num_active=fields.integer("num_experts_per_tok", 1, 1 << 16, default=4),
        normalize=fields.boolean("norm_topk_prob", default=True),
        scores="sigmoid",
        has_bias=fields.boolean("use_expert_bias", default=True),
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
    )
    experts = ExpertsSpec(
        num_experts=fields.integer("num_experts", 1, 1 << 16, default=32),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22, default=1792),
        routing=routing,
        dense_layers=tuple(range(min(num_dense, num_layers))),
        names=LFM2_NAMES,
    )
    return _body(fields) | {"experts": experts if num_dense < num_layers else None}


def _body(fields: Fields) -> Facts:
    for name in ("block_use_swiglu", "use_pos_enc"):
        if not fields.boolean(name, default=True):
            raise fields.error(name, False, "only true is supported")
    size = fields.integer("hidden_size", 1, 1 << 20)
    for name in ("conv_dim", "conv_dim_out", "block_dim"):
        if fields.integer(name, 1, 1 << 20, default=size) != size:
            raise fields.error(name, fields.get(name), f"only the hidden size {size} is supported")
    layers = _conv_layers(fields)
    state = StateSpec(
        layers=layers,
        conv_size=size,
        conv_taps=fields.integer("conv_L_cache", 2, _MAX_TAPS, default=3),
        conv_bias=fields.boolean("conv_bias", default=False),
    )
    return rope_facts(fields, read_rope(fields, _THETA)) | {
        "form": LFM2_FORM,
        "state": state if any(layers) else None,
    }


def _mlp_width(fields: Fields) -> int:
    """Two thirds of the width in the file, times a factor, rounded up; unless the file says that it is final."""
    width = fields.integer("intermediate_size", 1, 1 << 22)
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    if fields.get("block_ffn_dim_multiplier") is None:
        return width
    multiple = fields.integer("block_multiple_of", 1, 1 << 20, default=256)
    width = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3) * width)
    return -(-width // multiple) * multiple


def _conv_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have a short convolution instead of attention."""
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
            raise fields.error("layer_types", kinds, f"expected a list of {' and '.join(_KINDS)}")
        return tuple(kind == "conv" for kind in kinds)
    if fields.get("full_attn_idxs") is None:
        return (False,) * num_layers
    attention = fields.integers("full_attn_idxs", 0, 1 << 12)
    return tuple(layer not in attention for layer in range(num_layers))


_SIGMOID: Final = 2
"""llama.cpp's number of this function of a router."""


def _lfm2_gguf(fields: Fields, arch: str) -> Facts:
    """A layer without heads of keys and values has a short convolution."""
    heads = kv_heads(fields, arch)
    state = StateSpec(
        layers=tuple(count == 0 for count in heads),
        conv_size=fields.integer(f"{arch}.embedding_length", 1, 1 << 20),
        conv_taps=fields.integer(f"{arch}.shortconv.l_cache", 2, 64),
    )
    return {
        "num_kv_heads": max(heads),
        "form": LFM2_FORM,
        "state": state if any(state.layers) else None,
    }


def _lfm2_moe_gguf(fields: Fields, arch: str) -> Facts:
    key = f"{arch}.expert_gating_func"
    if fields.integer(key, 0, 1 << 8, default=_SIGMOID) != _SIGMOID:
        raise fields.error(key, fields.get(key), f"only {_SIGMOID}, a sigmoid, is supported")
    experts = mixture_of(fields, arch, LFM2_NAMES)
    num_dense = fields.integer(f"{arch}.leading_dense_block_count", 0, 1 << 12, default=0)
    experts = structs.replace(
        experts,
        dense_layers=tuple(range(num_dense)),
        routing=structs.replace(experts.routing, scores="sigmoid", has_bias=True),
    )
    return _lfm2_gguf(fields, arch) | {"experts": experts}


_NAMES: Final = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}


FAMILIES: Final = (
    Family(
        "lfm2",
        structure="hybrid",
        published="LFM2, LFM2.5",
        architecture="Lfm2ForCausalLM",
        read=_lfm2,
        tied=True,
        norm_eps="norm_eps",
        renamed={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
        gguf={"lfm2": GGUF(_lfm2_gguf, _NAMES)},
    ),
    Family(
        "lfm2_moe",
        structure="hybrid",
        published="LFM2-8B-A1B",
        architecture="Lfm2MoeForCausalLM",
        read=_lfm2_moe,
        tied=True,
        norm_eps="norm_eps",
        renamed={"tie_embedding": "tie_word_embeddings"},
        gguf={"lfm2moe": GGUF(_lfm2_moe_gguf, _NAMES, has_experts=True)},
    ),
)
