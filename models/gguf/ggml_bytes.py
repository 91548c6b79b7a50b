"""Parts of the blocks of GGUF formats that several formats have: halves, nibbles."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_HALF_BLOCK: Final = np.dtype("V16")


def f16(b: Bytes) -> Floats:
    """Half floats, [N, 2k] bytes -> [N, k] float32."""
    return b.view(np.float16).astype(np.float32)


def nibbles(qs: Bytes, out: Floats | Bytes) -> None:
    """The 32 numbers of 16 bytes each, [N, 16] -> [N, 32]: first the low nibbles, then the high ones."""
    # The copy treats 16 bytes as one item, because numpy is slow on short rows.
    together = np.ascontiguousarray(qs.view(_HALF_BLOCK)).view(np.uint8)
    for half, numbers in enumerate((together & 15, together >> 4)):
        if out.dtype == np.uint8:
            out.view(_HALF_BLOCK)[:, half] = numbers.view(_HALF_BLOCK)[:, 0]
        else:
            np.copyto(out[:, 16 * half : 16 * half + 16], numbers)
