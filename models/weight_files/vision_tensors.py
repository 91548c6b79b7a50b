"""The names of a tower's modules in files, by which it is checked, counted and built: SigLIP and a connector.

A folder may have `model.` and `vision_tower.` before them, which `usual_names` removes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .gemma4_vision_tensors import GEMMA4_TOWERS, gemma4_modules, gemma4_unified_modules
from .needed_tensors import Module
from .pixtral_tensors import pixtral_modules
from .qwen_vision_tensors import QWEN_FORMS, QWEN_TOWER, qwen_vision_modules

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec
    from ..spec.vision_spec import VisionSpec

TOWER: Final = ("vision_model.", "connector.", "multi_modal_projector.", QWEN_TOWER, *GEMMA4_TOWERS)
"""The first parts of all names."""
PATCHES: Final = "vision_model.embeddings.patch_embedding"
"""[hidden, 3, side, side]: a product with each patch, which files have as a convolution."""
POSITIONS: Final = "vision_model.embeddings.position_embedding"
FINAL_NORM: Final = "vision_model.post_layernorm"
CLASS, CLASS_PART = "vision_model.embeddings", "class_embedding"
FIRST_NORM: Final = "vision_model.pre_layrnorm"
"""Norm before the layers of CLIP, misspelled in its files, and of Llama 4."""
SCALES: Final = ("lambda_1", "lambda_2")
"""Parameters of a layer of InternViT."""
MLP_NORM, MLP_FIRST, MLP_SECOND = (
    f"multi_modal_projector.{name}" for name in ("layer_norm", "linear_1", "linear_2")
)
"""Connector of LLaVA, and with the norm of InternVL."""
NEWLINE, NEWLINE_PART = "multi_modal_projector", "image_newline"
"""The row that ends rows of patches in LLaVA-NeXT."""
ADAPTER_FIRST, ADAPTER_SECOND = (f"vision_model.vision_adapter.mlp.{name}" for name in ("fc1", "fc2"))
"""Connector of Llama 4, before `MLP_FIRST`."""
PROJECTION: Final = "connector.modality_projection.proj"
"""Connector of Idefics3."""
POOLED, POOLED_NORM, POOLED_PROJECTION = (
    "multi_modal_projector",
    "multi_modal_projector.mm_soft_emb_norm",
    "mm_input_projection_weight",
)
"""Connector of Gemma 3; its projection is [hidden of the tower, hidden of the language model]."""
QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def tower_layer(layer_id: int) -> str:
    """The name of a layer, to which the names of its modules are appended."""
    return f"vision_model.encoder.layers.{layer_id}."


def is_unused_of_tower(vision: VisionSpec | None, name: str) -> bool:
    """Whether a tensor is of a layer after the one whose output is used, or of the norm after the last layer."""
    if vision is None or not name.startswith("vision_model."):
        return False
    if name.startswith(f"{FINAL_NORM}."):
        return not vision.ends_normed
    number = name.removeprefix(tower_layer(0).removesuffix("0.")).partition(".")[0]
    return number.isdecimal() and int(number) >= vision.num_layers


def patches_shape(vision: VisionSpec) -> tuple[int, ...]:
    """Shape of the weights of patches in files: a convolution, but in Llama 4 a product."""
    size, side = vision.hidden_size, vision.patch_size
    return (size, vision.patch_values) if vision.body == "llama4" else (size, 3, side, side)


def positions_shape(vision: VisionSpec) -> tuple[int, ...]:
    """Shape of the table of positions in files; InternViT's have an axis of length 1 before it."""
    return (*_batch(vision), vision.num_tower_rows, vision.hidden_size)


def class_shape(vision: VisionSpec) -> tuple[int, ...]:
    """Shape of the row of the class in files."""
    return (*_batch(vision), *_batch(vision), vision.hidden_size)


def _batch(vision: VisionSpec) -> tuple[int, ...]:
    return (1,) if vision.body == "internvit" else ()


def vision_modules(spec: ModelSpec) -> Iterator[Module]:
    """All modules of the tower and of its connector; none in a model without them."""
    vision = spec.vision
    if vision is None:
        return
    if vision.family in QWEN_FORMS:
        yield from qwen_vision_modules(vision, spec.hidden_size)
        return
    if vision.family == "pixtral":
        yield from pixtral_modules(vision, spec.hidden_size)
        return
    if vision.family == "gemma4":
        yield from gemma4_modules(vision, spec.hidden_size)
        return
    if vision.family == "gemma4_unified":
        yield from gemma4_unified_modules(vision, spec.hidden_size)
        return
    size, inner = vision.hidden_size, vision.intermediate_size
    yield Module(PATCHES, patches_shape(vision), has_bias=vision.body in ("siglip", "internvit"))
    yield Module(POSITIONS, positions_shape(vision))
    if vision.body != "siglip":
        yield Module(CLASS, class_shape(vision), part=CLASS_PART)
    if vision.body in ("clip", "llama4"):
        yield Module(FIRST_NORM, (size,), has_bias=True)
    for layer_id in range(vision.num_layers):
        name = tower_layer(layer_id)
        for norm in ("layer_norm1", "layer_norm2"):
            yield Module(name + norm, (size,), has_bias=True)
        for linear in QKV:
            yield Module(name + linear, (size, size), has_bias=vision.has_qkv_bias)
        yield Module(f"{name}self_attn.out_proj", (size, size), has_bias=True)
        for part in SCALES if vision.body == "internvit" else ():
            yield Module(name.removesuffix("."), (size,), part=part)
        yield Module(f"{name}mlp.fc1", (inner, size), has_bias=True)
        yield Module(f"{name}mlp.fc2", (size, inner), has_bias=True)
    if vision.ends_normed:
        yield Module(FINAL_NORM, (size,), has_bias=True)
    if vision.family in ("llava", "llava_next", "internvl"):
        if vision.family == "llava_next":
            yield Module(NEWLINE, (spec.hidden_size,), part=NEWLINE_PART)
        if vision.family == "internvl":
            yield Module(MLP_NORM, (vision.joined_size,), has_bias=True)
        yield Module(MLP_FIRST, (spec.hidden_size, vision.joined_size), has_bias=vision.has_mlp_bias)
        yield Module(MLP_SECOND, (spec.hidden_size, spec.hidden_size), has_bias=vision.has_mlp_bias)
    elif vision.family == "llama4":
        inner = vision.connector_size
        yield Module(ADAPTER_FIRST, (inner, vision.joined_size))
        yield Module(ADAPTER_SECOND, (inner, inner))
        yield Module(MLP_FIRST, (spec.hidden_size, inner))
    elif vision.family == "gemma3":
        yield Module(POOLED, (size, spec.hidden_size), part=POOLED_PROJECTION)
        yield Module(POOLED_NORM, (size,))
    else:
        yield Module(PROJECTION, (spec.hidden_size, vision.joined_size))
