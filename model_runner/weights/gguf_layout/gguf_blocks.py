"""`block_weight`: rows of a GGUF tensor as a `BlockWeight`: the file's integers, or values rounded to 8 bits.

`mxfp4_rows` makes such rows of the experts of a folder in MXFP4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from ....runtime.model_files.block_forms import GGUF_FORMS
from ....runtime.model_files.gguf.ggml_blocks import unpack_blocks
from ....runtime.model_files.gguf.ggml_types import GGML_TYPES, dequantize
from ...kernels.block_rounding import round_to_blocks
from ...kernels.quantized_weights import BlockWeight, stack_blocks

if TYPE_CHECKING:
    from ....runtime.model_files.gguf.ggml_bytes import Bytes
    from ....runtime.model_files.gguf.ggml_types import GGMLType

MXFP4: Final = next(one for one in GGML_TYPES.values() if one.name == "MXFP4")

_ROWS_AT_A_TIME: Final = 4096
"""Rows rounded at a time: bounds their float32 copy."""


def block_weight(raw: Bytes, ggml_type: GGMLType) -> BlockWeight:
    """Convert rows [N, row_bytes] of a format that has a `BlockForm`."""
    form = GGUF_FORMS[ggml_type.name]
    if not form.is_exact:
        pieces = (raw[start : start + _ROWS_AT_A_TIME] for start in range(0, len(raw), _ROWS_AT_A_TIME))
        return stack_blocks(
            [round_to_blocks(torch.from_numpy(dequantize(one, ggml_type)), 8) for one in pieces]
        )
    numbers, scales, minima = unpack_blocks(raw, ggml_type)
    return BlockWeight(
        torch.from_numpy(numbers),
        torch.from_numpy(scales),
        None if minima is None else torch.from_numpy(minima),
        form.zero,
        form.bits,
        form.table,
    )


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
