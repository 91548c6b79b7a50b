"""The names of the modules of Pixtral's tower and its connectors, by which they are checked and built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .needed_tensors import Module

if TYPE_CHECKING:
    from ..spec.vision_spec import VisionSpec

PIXTRAL_PATCHES: Final = "vision_model.patch_conv"
PIXTRAL_NORM: Final = "vision_model.ln_pre"
PIXTRAL_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
PIXTRAL_OUT: Final = "self_attn.out_proj"
"""Files have `o_proj`; `usual_names` gives it the name of other towers."""
PIXTRAL_UPS, PIXTRAL_DOWN = ("feed_forward.gate_proj", "feed_forward.up_proj"), "feed_forward.down_proj"
MERGER_NORM, MERGER, MERGER_FIRST, MERGER_SECOND = (
    f"multi_modal_projector.{name}" for name in ("norm", "patch_merger.merging_layer", "linear_1", "linear_2")
)


def pixtral_layer(layer_id: int) -> str:
    """The name of a layer, to which the names of its modules are appended."""
    return f"vision_model.transformer.layers.{layer_id}."


def pixtral_modules(vision: VisionSpec, row_size: int) -> Iterator[Module]:
    """All modules; `row_size`: hidden size of the language model."""
    size, inner, side = vision.hidden_size, vision.intermediate_size, vision.patch_size
    yield Module(PIXTRAL_PATCHES, (size, 3, side, side))
    yield Module(PIXTRAL_NORM, (size,))
    for layer_id in range(vision.num_layers):
        name = pixtral_layer(layer_id)
        for norm in ("attention_norm", "ffn_norm"):
            yield Module(name + norm, (size,))
        for linear in (*PIXTRAL_QKV, PIXTRAL_OUT):
            yield Module(name + linear, (size, size))
        for up in PIXTRAL_UPS:
            yield Module(name + up, (inner, size))
        yield Module(name + PIXTRAL_DOWN, (size, inner))
    if vision.scale_factor > 1:
        yield Module(MERGER_NORM, (size,))
        yield Module(MERGER, (size, vision.joined_size))
    yield Module(MERGER_FIRST, (row_size, size), has_bias=vision.has_mlp_bias)
    yield Module(MERGER_SECOND, (row_size, row_size), has_bias=vision.has_mlp_bias)
