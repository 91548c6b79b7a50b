"""The names of the modules by which Gemma 4 sees, by which they are checked, counted and built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .needed_tensors import Module

if TYPE_CHECKING:
    from ..spec.vision_spec import VisionSpec

GEMMA4_TOWER: Final = "vision_model"
GEMMA4_SCALES: Final = ("std_bias", "std_scale")
"""Parts of the tower itself: the offset and the factor of means of patches."""
GEMMA4_PATCHES: Final = "vision_model.patch_embedder.input_proj"
"""[hidden, side * side * 3]: the values of a patch are by row, then by column, then by color."""
GEMMA4_POSITIONS, GEMMA4_TABLES = "vision_model.patch_embedder", "position_embedding_table"
"""[2, rows, hidden]: by column, then by row."""
GEMMA4_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA4_HEAD_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")
GEMMA4_QKV, GEMMA4_OUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"
GEMMA4_UPS, GEMMA4_DOWN = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
GEMMA4_LINEAR: Final = ".linear"
"""The linear layer within each of these, beside its bounds."""
GEMMA4_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
GEMMA4_TOWERS: Final = ("embed_vision.", "vision_embedder.")
"""The first parts of names of the connector, and of what Gemma 4 12B has instead of a tower."""
UNIFIED_NORMS: Final = ("vision_embedder.patch_ln1", "vision_embedder.patch_ln2", "vision_embedder.pos_norm")
UNIFIED_PRODUCT: Final = "vision_embedder.patch_dense"
UNIFIED_POSITIONS, UNIFIED_TABLES = "vision_embedder", "pos_embedding"
"""[rows, 2, hidden]: by column, then by row."""
GEMMA4_PROJECTION: Final = "embed_vision.embedding_projection"


def gemma4_layer(layer_id: int) -> str:
    """The name of a layer, to which the names of its modules are appended."""
    return f"vision_model.encoder.layers.{layer_id}."


def gemma4_modules(vision: VisionSpec, row_size: int) -> Iterator[Module]:
    """All modules; `row_size`: hidden size of the language model."""
    size, inner = vision.hidden_size, vision.intermediate_size
    yield Module(GEMMA4_PATCHES, (size, vision.patch_values))
    yield Module(GEMMA4_POSITIONS, (2, vision.num_positions, size), part=GEMMA4_TABLES)
    linears = {
        **dict.fromkeys((*GEMMA4_QKV, GEMMA4_OUT), (size, size)),
        **dict.fromkeys(GEMMA4_UPS, (inner, size)),
        GEMMA4_DOWN: (size, inner),
    }
    for layer_id in range(vision.num_layers):
        name = gemma4_layer(layer_id)
        for norm in GEMMA4_NORMS:
            yield Module(name + norm, (size,))
        for norm in GEMMA4_HEAD_NORMS:
            yield Module(name + norm, (size // vision.num_heads,))
        for linear, shape in linears.items():
            yield Module(name + linear + GEMMA4_LINEAR, shape)
            for bound in GEMMA4_BOUNDS if vision.clips else ():
                yield Module(name + linear, (), part=bound)
    for part in GEMMA4_SCALES if vision.standardizes else ():
        yield Module(GEMMA4_TOWER, (size,), part=part)
    yield Module(GEMMA4_PROJECTION, (row_size, size))


def gemma4_unified_modules(vision: VisionSpec, row_size: int) -> Iterator[Module]:
    """All modules of Gemma 4 12B; `row_size`: hidden size of the language model."""
    size, values = vision.hidden_size, vision.patch_values
    for norm, width in zip(UNIFIED_NORMS, (values, size, size), strict=True):
        yield Module(norm, (width,), has_bias=True)
    yield Module(UNIFIED_PRODUCT, (size, values), has_bias=True)
    yield Module(UNIFIED_POSITIONS, (vision.num_positions, 2, size), part=UNIFIED_TABLES)
    yield Module(GEMMA4_PROJECTION, (row_size, size))
