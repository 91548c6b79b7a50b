"""The tensors of towers in `mmproj` files, by llama.cpp's names, for checks and loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..gguf.gguf_file import GGUFFile, TensorInfo, dequantize
from .pixtral_tensors import (
    MERGER,
    MERGER_FIRST,
    MERGER_NORM,
    MERGER_SECOND,
    PIXTRAL_NORM,
    PIXTRAL_PATCHES,
    pixtral_layer,
)
from .qwen_vision_tensors import QWEN_FORMS, QWEN_PATCHES, QWEN_POSITIONS, qwen_connectors, qwen_layer
from .vision_tensors import (
    ADAPTER_FIRST,
    ADAPTER_SECOND,
    CLASS,
    CLASS_PART,
    FINAL_NORM,
    FIRST_NORM,
    MLP_FIRST,
    MLP_NORM,
    MLP_SECOND,
    NEWLINE,
    NEWLINE_PART,
    PATCHES,
    POOLED,
    POOLED_NORM,
    POOLED_PROJECTION,
    POSITIONS,
    PROJECTION,
    SCALES,
    tower_layer,
)

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec
    from ..spec.vision_spec import VisionSpec

_LAYER: Final = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_MLP: Final = {MLP_FIRST: "mm.0", MLP_SECOND: "mm.2"}
_CONNECTORS: Final = {
    "idefics3": {PROJECTION: "mm.model.fc"},
    "gemma3": {POOLED_NORM: "mm.soft_emb_norm"},
    "llava": _MLP,
    "llava_next": _MLP,
    "internvl": {MLP_NORM: "mm.model.mlp.0", MLP_FIRST: "mm.model.mlp.1", MLP_SECOND: "mm.model.mlp.3"},
    "llama4": {ADAPTER_FIRST: "mm.model.mlp.1", ADAPTER_SECOND: "mm.model.mlp.2", MLP_FIRST: "mm.model.fc"},
}
_PIXTRAL_LAYER: Final = {
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    **{name: stored for name, stored in _LAYER.items() if name.startswith("self_attn.")},
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
_QWEN_LAYER: Final = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
_QWEN_MLPS: Final = {2: ("ffn_up", "ffn_down"), 3: ("ffn_gate", "ffn_up", "ffn_down")}


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


class Thirds(NamedTuple):
    """The three tensors that a product to queries, keys and values is stored as, or its bias."""

    queries: TensorInfo
    keys: TensorInfo
    values: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole: [3 * hidden, hidden], or [3 * hidden]."""
        return (sum(each.shape[0] for each in self), *self.queries.shape[1:])

    def read(self, file: GGUFFile) -> npt.NDArray[np.float32]:
        """The whole, as Hugging Face has it."""
        parts = [dequantize(each, file.raw(each)) for each in self]
        return np.concatenate([each.reshape(info.shape) for each, info in zip(parts, self, strict=True)])


def find_parts(file: GGUFFile, spec: ModelSpec) -> dict[str, Frames | Thirds]:
    """Tensors that a file stores in parts, by the Hugging Face name of the whole; only Qwen's towers are stored so."""
    if spec.vision is None or spec.vision.family not in QWEN_FORMS:
        return {}
    found: dict[str, Frames | Thirds] = {}
    frames = [file.tensors.get(name) for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")]
    if frames[0] is not None and frames[1] is not None and frames[0].shape == frames[1].shape:
        found[f"{QWEN_PATCHES}.weight"] = Frames(frames[0], frames[1])
    for layer in range(spec.vision.num_layers):
        for part in ("weight", "bias"):
            thirds = [file.tensors.get(f"v.blk.{layer}.attn_{which}.{part}") for which in "qkv"]
            known = [each for each in thirds if each is not None]
            if len(known) == 3 and len({each.shape[1:] for each in known}) == 1:
                found[f"{qwen_layer(layer)}attn.qkv.{part}"] = Thirds(*known)
    return found


def gguf_tower_names(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Every tensor of a tower, and llama.cpp's name of it, as `stored_names`."""
    vision = spec.vision
    if vision is None:
        return
    if vision.family in QWEN_FORMS:
        names = _qwen_modules(vision)
    elif vision.family == "pixtral":
        names = _pixtral_modules(vision)
    else:
        names = _tile_modules(vision)
        yield f"{POOLED}.{POOLED_PROJECTION}", "mm.input_projection.weight"
        yield f"{CLASS}.{CLASS_PART}", "v.class_embd"
        yield f"{NEWLINE}.{NEWLINE_PART}", "model.image_newline"
        for layer in range(vision.num_layers):
            for part, stored in zip(SCALES, ("ls1", "ls2"), strict=True):
                yield tower_layer(layer) + part, f"v.blk.{layer}.{stored}.weight"
    for hf, gguf in names.items():
        for part in ("weight", "bias"):
            yield f"{hf}.{part}", f"{gguf}.{part}"


def _tile_modules(vision: VisionSpec) -> dict[str, str]:
    names = {
        PATCHES: "v.patch_embd",
        POSITIONS: "v.position_embd",
        FINAL_NORM: "v.post_ln",
        FIRST_NORM: "v.pre_ln",
    }
    names |= _CONNECTORS.get(vision.family, {})
    for layer in range(vision.num_layers):
        names |= {tower_layer(layer) + hf: f"v.blk.{layer}.{gguf}" for hf, gguf in _LAYER.items()}
    return names


def _pixtral_modules(vision: VisionSpec) -> dict[str, str]:
    names = {PIXTRAL_PATCHES: "v.patch_embd", PIXTRAL_NORM: "v.pre_ln", MERGER_NORM: "mm.input_norm"}
    names |= {MERGER: "mm.patch_merger", MERGER_FIRST: "mm.1", MERGER_SECOND: "mm.2"}
    for layer in range(vision.num_layers):
        names |= {pixtral_layer(layer) + hf: f"v.blk.{layer}.{gguf}" for hf, gguf in _PIXTRAL_LAYER.items()}
    return names


def _qwen_modules(vision: VisionSpec) -> dict[str, str]:
    form, names = QWEN_FORMS[vision.family], {QWEN_PATCHES: "v.patch_embd", QWEN_POSITIONS: "v.position_embd"}
    mlp = zip((f"mlp.{name}" for name in form.mlp), _QWEN_MLPS[len(form.mlp)], strict=True)
    in_layer = _QWEN_LAYER | dict(mlp)
    for layer in range(vision.num_layers):
        names |= {qwen_layer(layer) + hf: f"v.blk.{layer}.{gguf}" for hf, gguf in in_layer.items()}
    parts = form.connector
    first, *others = qwen_connectors(vision)
    names |= dict(zip((first + part for part in parts), ("v.post_ln", "mm.0", "mm.2"), strict=True))
    for layer, connector in zip(vision.deepstack_layers, others, strict=True):
        stored = (f"v.deepstack.{layer}.{part}" for part in ("norm", "fc1", "fc2"))
        names |= dict(zip((connector + part for part in parts), stored, strict=True))
    return names
