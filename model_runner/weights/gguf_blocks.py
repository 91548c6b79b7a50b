"""`block_weight`: rows of a GGUF tensor as a `BlockWeight`: the file's integers, or values rounded to 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ...runtime.model_files.block_forms import GGUF_FORMS
from ...runtime.model_files.gguf.ggml_blocks import unpack_blocks
from ...runtime.model_files.gguf.ggml_types import dequantize
from ..kernels.block_rounding import round_to_blocks
from ..kernels.quantized_weights import BlockWeight, stack_blocks

if TYPE_CHECKING:
    from ...runtime.model_files.gguf.ggml_bytes import Bytes
    from ...runtime.model_files.gguf.ggml_types import GGMLType

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
