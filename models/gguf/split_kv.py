"""`SplitKV`: keys and values from latents in files that hold them as two tensors per layer.

llama.cpp's converter stores `kv_b_proj` as `attn_k_b`, transposed per head for absorbed queries, and `attn_v_b`. Files
from before May 2025 have the whole matrix, `attn_kv_b`.
"""

# Shapes: H heads, K size of a latent.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ...runtime.errors import ConfigError
from ..spec.layer_form import KV_UP
from .gguf_file import GGUFFile, TensorInfo, dequantize

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec


class SplitKV(NamedTuple):
    """The two tensors of a layer: [H, K, unrotated] and [H, values, K]."""

    keys: TensorInfo
    values: TensorInfo

    @property
    def shape(self) -> tuple[int, int]:
        """That of the whole matrix."""
        num_heads, size, width = self.keys.shape
        return num_heads * (width + self.values.shape[1]), size

    def read(self, file: GGUFFile) -> npt.NDArray[np.float32]:
        """The whole matrix as Hugging Face has it: [H * (unrotated + values), K]."""
        parts = []
        for keys, values in zip(file.raw(self.keys), file.raw(self.values), strict=True):
            parts += [dequantize(self.keys, keys).T, dequantize(self.values, values)]
        return np.concatenate(parts)


def find_split_kv(file: GGUFFile, spec: ModelSpec) -> dict[str, SplitKV]:
    """The split matrices of a file by the Hugging Face name of the whole; empty if it has none.

    Raises:
        ConfigError: a part is missing, or of another shape.
    """
    latent, found = spec.latent, {}
    for layer in range(spec.num_layers if latent is not None else 0):
        assert latent is not None
        names = f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight"
        if not set(names) & set(file.tensors):
            continue
        shapes = (
            (spec.num_heads, latent.kv_lora_rank, latent.qk_nope_head_dim),
            (spec.num_heads, latent.v_head_dim, latent.kv_lora_rank),
        )
        for name, shape in zip(names, shapes, strict=True):
            if name not in file.tensors:
                raise ConfigError(f"{file.path}: tensor {name!r} is missing; download the file again")
            if file.tensors[name].shape != shape:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has the shape {list(file.tensors[name].shape)}, but the metadata "
                    f"asks for {list(shape)}; the file is damaged: download it again"
                )
        keys, values = (file.tensors[name] for name in names)
        found[f"model.layers.{layer}.{KV_UP}.weight"] = SplitKV(keys, values)
    return found
