"""`mxfp4_rows`: rows of a GGUF tensor in MXFP4, of the experts of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ....models.gguf.ggml_types import GGML_TYPES

if TYPE_CHECKING:
    from ....models.gguf.ggml_codes import Bytes

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
