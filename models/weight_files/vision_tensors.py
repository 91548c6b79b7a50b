"""The names of a tower's modules in files, by which it is checked, counted and built: SigLIP and a connector.

A folder may have `model.` and `vision_tower.` before them, which `usual_names` removes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .needed_tensors import Module
from .qwen_vision_tensors import QWEN_FORMS, QWEN_TOWER, qwen_vision_modules

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec

TOWER: Final = ("vision_model.", "connector.", "multi_modal_projector.", QWEN_TOWER)
"""The first parts of all names."""
PATCHES: Final = "vision_model.embeddings.patch_embedding"
"""[hidden, 3, side, side]: a product with each patch, which files have as a convolution."""
POSITIONS: Final = "vision_model.embeddings.position_embedding"
FINAL_NORM: Final = "vision_model.post_layernorm"
PROJECTION: Final = "connector.modality_projection.proj"
"""Of Idefics3."""
POOLED, POOLED_NORM, POOLED_PROJECTION = (
    "multi_modal_projector",
    "multi_modal_projector.mm_soft_emb_norm",
    "mm_input_projection_weight",
)
"""Of Gemma 3, whose projection is [hidden of the tower, hidden of the language model]."""
_GGUF_NAMES: Final = {
    "idefics3": {
        PATCHES: "v.patch_embd",
        POSITIONS: "v.position_embd",
        FINAL_NORM: "v.post_ln",
        PROJECTION: "mm.model.fc",
    },
}
_GGUF_LAYER_NAMES: Final = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def tower_layer(layer_id: int) -> str:
    """The name of a layer, to which the names of its modules are appended."""
    return f"vision_model.encoder.layers.{layer_id}."


def gguf_tower_names(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Every tensor of a tower and llama.cpp's name of it in a `mmproj` file, as `stored_names`."""
    if spec.vision is None:
        return
    names = dict(_GGUF_NAMES[spec.vision.family])
    for layer in range(spec.vision.num_layers):
        names |= {tower_layer(layer) + hf: f"v.blk.{layer}.{gguf}" for hf, gguf in _GGUF_LAYER_NAMES.items()}
    for hf, gguf in names.items():
        for part in ("weight", "bias"):
            yield f"{hf}.{part}", f"{gguf}.{part}"


def vision_modules(spec: ModelSpec) -> Iterator[Module]:
    """All modules of the tower and of its connector; none in a model without them."""
    vision = spec.vision
    if vision is None:
        return
    if vision.family in QWEN_FORMS:
        yield from qwen_vision_modules(vision, spec.hidden_size)
        return
    size, inner, side = vision.hidden_size, vision.intermediate_size, vision.patch_size
    yield Module(PATCHES, (size, 3, side, side), has_bias=True)
    yield Module(POSITIONS, (vision.grid**2, size))
    for layer_id in range(vision.num_layers):
        name = tower_layer(layer_id)
        for norm in ("layer_norm1", "layer_norm2"):
            yield Module(name + norm, (size,), has_bias=True)
        for linear in (*QKV, "self_attn.out_proj"):
            yield Module(name + linear, (size, size), has_bias=True)
        yield Module(f"{name}mlp.fc1", (inner, size), has_bias=True)
        yield Module(f"{name}mlp.fc2", (size, inner), has_bias=True)
    yield Module(FINAL_NORM, (size,), has_bias=True)
    if vision.family == "gemma3":
        yield Module(POOLED, (size, spec.hidden_size), part=POOLED_PROJECTION)
        yield Module(POOLED_NORM, (size,))
    else:
        yield Module(PROJECTION, (spec.hidden_size, vision.joined_size))
