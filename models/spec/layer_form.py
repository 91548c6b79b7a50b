"""`LayerForm`: how the layers of a decoder are put together, where families differ."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

NormKind = Literal["rms", "offset_rms", "layer"]
MLPKind = Literal["gated", "plain"]


class ModuleNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of modules that differ between families; the default is Llama's. `final_norm` is outside of layers.

    `mtp`: the prefix of layers that predict further tokens, which are not read; empty: see `num_mtp_layers`.
    """

    mlp: str = "mlp"
    attention_out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    final_norm: str = "norm"
    mtp: str = ""


class LayerForm(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of a decoder's layers; the default is Llama's.

    Attributes:
        norms: names of the norms of a layer, without those of heads.
        norm: kind of all norms except those of heads; `offset_rms`: the weight is 1 + the stored one, also of heads.
        norm_bias: these norms have biases.
        mlp: `gated`: down(act(gate) * up); `plain`: down(act(up)).
        qkv_names: modules of `self_attn` with q, k and v; one name: a matrix of all three.
        mlp_names: modules of `mlp`, down last; one name before it in a gated MLP: a matrix of gate and up.
        qk_norm_over_heads: q and k have one norm each over all of their heads together.
        unit_qk_norm: in layers that rotate, heads of q and k are divided by their root mean squares, without weights.
        interleaved_rope: rotary turns neighboring elements of a head, (0, 1), (2, 3), ...; else the halves are paired.
        embedding_scale: a factor of the embedding's vectors.
        residual_scale: a factor of what each block adds to the residual stream.
        logits_scale: a factor of the logits.
        logits_cap: logits become cap * tanh(logit / cap); None: they are not capped.
        names: of modules.
        head_bias: the output head has a bias.
        value_norm: each head of v is divided by its root mean square.
        full_keys_are_values: layers without a window have no v: values are the keys before norm and rotary.
        layer_scalars: each layer has a learned factor of its whole result.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: NormKind = "rms"
    norm_bias: bool = False
    mlp: MLPKind = "gated"
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    qk_norm_over_heads: bool = False
    unit_qk_norm: bool = False
    interleaved_rope: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    names: ModuleNames = ModuleNames()
    head_bias: bool = False
    value_norm: bool = False
    full_keys_are_values: bool = False
    layer_scalars: bool = False

    @property
    def fused_qkv(self) -> bool:
        """Whether one matrix holds q, k and v."""
        return len(self.qkv_names) == 1

    @property
    def fused_gate_up(self) -> bool:
        """Whether one matrix holds gate and up."""
        return self.mlp == "gated" and len(self.mlp_names) == 2


PRE_NORMS: Final = LayerForm()
"""A norm before attention and one before the MLP."""

PRE_NORMS_OVER_HEADS: Final = LayerForm(qk_norm_over_heads=True)
"""The same with norms of q and k over all heads, as in OLMoE."""

FUSED_QKV: Final = ("qkv_proj",)
"""The name of one matrix of q, k and v."""

FUSED: Final = LayerForm(qkv_names=FUSED_QKV, mlp_names=("gate_up_proj", "down_proj"))
"""The same; q, k, v are one matrix, gate and up another, as in Phi-3."""

FOUR_NORMS: Final = LayerForm(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)
"""Norms before and after attention and the MLP, as in Gemma."""

POST_NORMS_OVER_HEADS: Final = LayerForm(
    norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm_over_heads=True
)
"""Norms after attention and the MLP only, as in OLMo 2."""

GLM4: Final = LayerForm(
    norms=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    mlp_names=("gate_up_proj", "down_proj"),
    interleaved_rope=True,
)
"""Norms before and after attention and the MLP, by GLM-4's names."""

PARALLEL: Final = LayerForm(norms=("input_layernorm",), norm="layer", interleaved_rope=True)
"""One norm before attention and the MLP, which take the same input, as in Command R."""
