"""`stored_names`: the names in a GGUF file of the tensors of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..model_spec import ModelSpec

_GLOBAL_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_NAMES: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3_NAMES: Final = {
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_QK_NORM_NAMES: Final = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_EXPERT_NAMES: Final = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}

NOT_WEIGHTS: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors of the rope scaling, see `gguf_rope`."""

FUSED: Final = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Modules of Phi-3 that are separate modules in other models."""


def stacked_names(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Modules of experts without their numbers, and the file's tensors that stack those of a layer."""
    for layer in range(spec.num_layers if spec.experts is not None else 0):
        for hf, gguf in _EXPERT_NAMES.items():
            yield f"model.layers.{layer}.mlp.experts.{hf}", f"blk.{layer}.{gguf}.weight"


def stored_names(spec: ModelSpec, *, experts: bool = True) -> Iterator[tuple[str, str, int | None]]:
    """Every tensor the model may have: Hugging Face's name, the file's name, and the index of the expert in it.

    Without `experts` there are at most some hundred thousand, for any values in the file.
    """
    for hf, gguf in _GLOBAL_NAMES.items():
        yield hf, gguf, None
    in_layer = dict(_LAYER_NAMES)
    if spec.model_type == "gemma3_text":
        in_layer |= _GEMMA3_NAMES
    if spec.model_type == "phi3":
        in_layer = {hf: gguf for hf, gguf in in_layer.items() if gguf != "ffn_up"} | _PHI3_NAMES
    if spec.qk_norm:
        in_layer |= _QK_NORM_NAMES
    for layer in range(spec.num_layers):
        for hf, gguf in in_layer.items():
            for part in ("weight", "bias"):
                yield f"model.layers.{layer}.{hf}.{part}", f"blk.{layer}.{gguf}.{part}", None
        if experts and spec.experts is not None:
            yield f"model.layers.{layer}.mlp.gate.weight", f"blk.{layer}.ffn_gate_inp.weight", None
            for hf, gguf in _EXPERT_NAMES.items():
                for expert in range(spec.experts.num_experts):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{hf}.weight"
                    yield name, f"blk.{layer}.{gguf}.weight", expert
