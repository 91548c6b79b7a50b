"""`StoredOrder`: where the rows and inputs of a tensor are in a GGUF file, if not in Hugging Face's order."""

# Shapes: H value heads, Hk key heads.

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from ...models.families.registry import gguf_of
from ...models.gguf.ggml_types import GGML_TYPES
from ...models.gguf_names import A_LOG
from ...models.spec.quantization import BLOCK_LEN
from ...models.weight_files.pixtral_tensors import PIXTRAL_QKV, pixtral_layer

if TYPE_CHECKING:
    from ...models.gguf.ggml_codes import Bytes
    from ...models.spec.model_spec import ModelSpec


_LAYER_PATTERN: Final = re.compile(r"model\.layers\.\d+\.(.+)")
_OF_VALUES: Final = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", A_LOG, "dt_bias")
_AFTER_KEYS: Final = ("in_proj_qkv.weight", "conv1d.weight")
_STATE_LAYER: Final = "linear_attn."
_PIXTRAL_LAYERS: Final = pixtral_layer(0).removesuffix("0.")
_QUERIES_AND_KEYS: Final = tuple(f"{name}.weight" for name in PIXTRAL_QKV[:2])


class StoredOrder:
    """The order of one file."""

    def __init__(self, spec: ModelSpec) -> None:
        """`spec`: of the whole model."""
        family = gguf_of(spec.model_type)
        self._heads: dict[str, int] = {}
        if family is not None and family.neighbors:
            self._heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}
        self._tower_heads = 0
        if spec.vision is not None and spec.vision.family == "pixtral":
            self._tower_heads = spec.vision.num_heads
        self._delta = None
        if family is not None and family.tiled_values and spec.state is not None:
            self._delta = spec.state.delta

    def rows(self, name: str, num_rows: int) -> Tensor | None:
        """For each of Hugging Face's rows the one of the file, [rows]; None: the same."""
        match = _LAYER_PATTERN.fullmatch(name)
        if match is None:
            if self._tower_heads and name.startswith(_PIXTRAL_LAYERS) and name.endswith(_QUERIES_AND_KEYS):
                return pairs_apart(torch.arange(num_rows), self._tower_heads)
            return None
        module, _, part = match[1].rpartition(".")
        if module in self._heads and part in ("weight", "bias"):
            return pairs_apart(torch.arange(num_rows), self._heads[module])
        inner = match[1].removeprefix(_STATE_LAYER)
        if self._delta is None or inner == match[1]:
            return None
        if inner in _OF_VALUES:
            return self._values(num_rows)
        if inner in _AFTER_KEYS:
            first = 2 * self._delta.key_size
            return torch.cat((torch.arange(first), first + self._values(num_rows - first)))
        return None

    def inputs(self, name: str) -> Tensor | None:
        """The same for the inputs of a matrix."""
        if self._delta is None or not name.endswith(f".{_STATE_LAYER}out_proj.weight"):
            return None
        return self._values(self._delta.value_size)

    def _values(self, size: int) -> Tensor:
        """The places in the file of `size` elements that the value heads have evenly."""
        assert self._delta is not None
        by_head = torch.arange(size).view(self._delta.values_per_key, self._delta.num_key_heads, -1)
        return by_head.transpose(0, 1).flatten()


def whole_blocks(inputs: Tensor) -> Tensor:
    """The order of the blocks of 32 in an order of inputs, [K] -> [K / 32]; it must leave blocks whole."""
    first = inputs[::BLOCK_LEN]
    assert torch.equal(inputs.view(-1, BLOCK_LEN), first[:, None] + torch.arange(BLOCK_LEN)), inputs
    return first // BLOCK_LEN


def pairs_apart(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head: even rows first, then odd rows. [heads * D, ...] -> the same shape."""
    by_pair = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return by_pair.transpose(1, 2).reshape(weight.shape)


MXFP4: Final = next(one for one in GGML_TYPES.values() if one.name == "MXFP4")


def mxfp4_rows(numbers: Bytes, scales: Bytes) -> Bytes:
    """Rows of a GGUF tensor: each block's scale, then its first 16 numbers in the lower halves of bytes.

    Args:
        numbers: [N, K / 32, 16], neighboring numbers in one byte.
        scales: [N, K / 32].
    """
    ordered = np.stack((numbers & 15, numbers >> 4), axis=-1).reshape(*scales.shape, 32)
    halves = ordered[..., :16] | ordered[..., 16:] << 4
    blocks: Bytes = np.concatenate((scales[..., None], halves), axis=-1)
    return blocks.reshape(len(scales), -1)
