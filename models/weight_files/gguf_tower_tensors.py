"""The tensors of towers in `mmproj` files, by llama.cpp's names, for checks and loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..gguf.gguf_file import GGUFFile, TensorInfo, dequantize
from .qwen_vision_tensors import QWEN_FORMS, QWEN_PATCHES, QWEN_POSITIONS, qwen_connectors, qwen_layer
from .vision_tensors import (
    FINAL_NORM,
    PATCHES,
    POOLED,
    POOLED_NORM,
    POOLED_PROJECTION,
    POSITIONS,
    PROJECTION,
    tower_layer,
)

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec
    from ..spec.vision_spec import VisionSpec

_SIGLIP_LAYER: Final = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_QWEN3_LAYER: Final = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


class Frames(NamedTuple):
    """The two tensors that Qwen's product with patches is stored as, one for each frame of a video."""

    first: TensorInfo
    second: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole: [hidden, 3, frames, side, side]."""
        return (*self.first.shape[:2], len(self), *self.first.shape[2:])

    def read(self, file: GGUFFile) -> npt.NDArray[np.float32]:
        """The whole, as Hugging Face has it."""
        return np.stack([dequantize(each, file.raw(each)) for each in self], axis=2)


def find_frames(file: GGUFFile, spec: ModelSpec) -> dict[str, Frames]:
    """The frames of a file by the Hugging Face name of the whole; empty if the tower has none."""
    if spec.vision is None or spec.vision.family not in QWEN_FORMS:
        return {}
    first, second = (file.tensors.get(name) for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"))
    if first is None or second is None or first.shape != second.shape:
        return {}
    return {f"{QWEN_PATCHES}.weight": Frames(first, second)}


def gguf_tower_names(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Every tensor of a tower, and llama.cpp's name of it, as `stored_names`."""
    if spec.vision is None:
        return
    names = _qwen3_modules(spec.vision) if spec.vision.family == "qwen3_vl" else _siglip_modules(spec.vision)
    for hf, gguf in names.items():
        for part in ("weight", "bias"):
            yield f"{hf}.{part}", f"{gguf}.{part}"
    if spec.vision.family == "gemma3":
        yield f"{POOLED}.{POOLED_PROJECTION}", "mm.input_projection.weight"


def _siglip_modules(vision: VisionSpec) -> dict[str, str]:
    names = {PATCHES: "v.patch_embd", POSITIONS: "v.position_embd", FINAL_NORM: "v.post_ln"}
    names |= {PROJECTION: "mm.model.fc", POOLED_NORM: "mm.soft_emb_norm"}  # of Idefics3, and of Gemma 3
    for layer in range(vision.num_layers):
        names |= {tower_layer(layer) + hf: f"v.blk.{layer}.{gguf}" for hf, gguf in _SIGLIP_LAYER.items()}
    return names


def _qwen3_modules(vision: VisionSpec) -> dict[str, str]:
    names = {QWEN_PATCHES: "v.patch_embd", QWEN_POSITIONS: "v.position_embd"}
    for layer in range(vision.num_layers):
        names |= {qwen_layer(layer) + hf: f"v.blk.{layer}.{gguf}" for hf, gguf in _QWEN3_LAYER.items()}
    parts = QWEN_FORMS[vision.family].connector
    first, *others = qwen_connectors(vision)
    names |= dict(zip((first + part for part in parts), ("v.post_ln", "mm.0", "mm.2"), strict=True))
    for layer, connector in zip(vision.deepstack_layers, others, strict=True):
        stored = (f"v.deepstack.{layer}.{part}" for part in ("norm", "fc1", "fc2"))
        names |= dict(zip((connector + part for part in parts), stored, strict=True))
    return names
