"""`LayerForm`: how the layers of a decoder are put together, where families differ."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

NormKind = Literal["rms", "layer"]
MLPKind = Literal["gated", "plain"]


class LayerForm(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of a decoder's layers; the default is Llama's.

    Attributes:
        norms: names of the norms of a layer, without those of heads.
        norm: kind of all norms except those of heads.
        norm_bias: these norms have biases.
        mlp: `gated`: down(act(gate) * up); `plain`: down(act(up)).
        qk_norm_over_heads: q and k have one norm each over all of their heads together.
        interleaved_rope: rotary turns neighboring elements of a head, (0, 1), (2, 3), ...; else the halves are paired.
        embedding_scale: a factor of the embedding's vectors.
        residual_scale: a factor of what each block adds to the residual stream.
        logits_scale: a factor of the logits.
        logits_cap: logits become cap * tanh(logit / cap); None: they are not capped.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: NormKind = "rms"
    norm_bias: bool = False
    mlp: MLPKind = "gated"
    qk_norm_over_heads: bool = False
    interleaved_rope: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None


PRE_NORMS: Final = LayerForm()
"""A norm before attention and one before the MLP."""

FOUR_NORMS: Final = LayerForm(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)
"""Norms before and after attention and the MLP, as in Gemma."""
