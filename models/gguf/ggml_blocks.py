"""`unpack_blocks`: rows of a GGUF tensor to the integers, scales and minima that are stored there.

For weights that stay quantized; `ggml_types` has the layouts, `BlockForm` the meaning of the numbers. Exact: a
number, or its value in the form's table, less the form's zero or not, times its scale plus its minimum, in float32, is
bit-identical to the result of `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from ..spec.quantization import GGUF_FORMS
from .ggml_codes import CODED_TYPES, Bytes, Floats, f16, nibbles
from .ggml_types import GGMLType, fifth_bits, scales_and_mins_6bit

_CHUNK_NUMBERS: Final = 1 << 18
"""Numbers unpacked at a time, so that written values are still in the cache when they are read again."""


class UnpackedBlocks(NamedTuple):
    """Rows [N, K]: numbers [N, K] uint8; scales, and minima if the form has them, [N, K / 32] float32.

    Scales are [N, K / 16] if the form has them for 16 inputs.
    """

    numbers: Bytes
    scales: Floats
    minima: Floats | None


def unpack_blocks(raw: Bytes, ggml_type: GGMLType) -> UnpackedBlocks:
    """Unpack rows of blocks.

    Args:
        raw: [N, row_bytes] uint8.
        ggml_type: a format with an exact `BlockForm`.
    """
    form, unpack = GGUF_FORMS[ggml_type.name], _UNPACKERS[ggml_type.name]
    blocks = np.ascontiguousarray(raw).reshape(-1, ggml_type.block_bytes)
    num_blocks, row_len = len(blocks), raw.shape[1] // ggml_type.block_bytes * ggml_type.block_len
    numbers = np.empty((num_blocks, ggml_type.block_len), dtype=np.uint8)
    scales = np.empty((num_blocks, ggml_type.block_len // form.scale_len), dtype=np.float32)
    minima = np.empty_like(scales)
    step = _CHUNK_NUMBERS // ggml_type.block_len
    for start in range(0, num_blocks, step):
        chunk = slice(start, start + step)
        unpack(blocks[chunk], numbers[chunk], scales[chunk], minima[chunk])
    return UnpackedBlocks(
        numbers.reshape(-1, row_len),
        scales.reshape(-1, row_len // form.scale_len),
        minima.reshape(-1, row_len // form.scale_len) if form.has_minima else None,
    )


# Shapes below: b [n, block_bytes] uint8 in; q [n, block_len] uint8, s and m [n, block_len / 32] float32 to fill. m is
# not written if the form has no minima.


def _unpack_q4_0(b: Bytes, q: Bytes, s: Floats, _m: Floats) -> None:
    nibbles(b[:, 2:], q)
    s[:] = f16(b[:, :2])


def _unpack_q4_1(b: Bytes, q: Bytes, s: Floats, m: Floats) -> None:
    nibbles(b[:, 4:], q)
    s[:] = f16(b[:, :2])
    m[:] = f16(b[:, 2:4])


def _unpack_q5_0(b: Bytes, q: Bytes, s: Floats, _m: Floats) -> None:
    nibbles(b[:, 6:], q)
    q |= fifth_bits(b[:, 2:6])
    s[:] = f16(b[:, :2])


def _unpack_q5_1(b: Bytes, q: Bytes, s: Floats, m: Floats) -> None:
    nibbles(b[:, 8:], q)
    q |= fifth_bits(b[:, 4:8])
    s[:] = f16(b[:, :2])
    m[:] = f16(b[:, 2:4])


def _unpack_q8_0(b: Bytes, q: Bytes, s: Floats, _m: Floats) -> None:
    np.bitwise_xor(b[:, 2:], 0x80, out=q)  # from -128..127 to 0..255
    s[:] = f16(b[:, :2])


def _unpack_k(b: Bytes, s: Floats, m: Floats) -> None:
    scales, mins = scales_and_mins_6bit(b[:, 4:16])
    np.multiply(f16(b[:, :2]), scales, out=s)
    np.multiply(f16(b[:, 2:4]), mins, out=m)
    np.negative(m, out=m)


def _unpack_q4_k(b: Bytes, q: Bytes, s: Floats, m: Floats) -> None:
    qs = b[:, 16:].reshape(-1, 4, 32)
    pairs = q.reshape(-1, 4, 2, 32)
    np.bitwise_and(qs, 15, out=pairs[:, :, 0])
    np.right_shift(qs, 4, out=pairs[:, :, 1])
    _unpack_k(b, s, m)


def _unpack_q5_k(b: Bytes, q: Bytes, s: Floats, m: Floats) -> None:
    qs = b[:, 48:].reshape(-1, 4, 32)
    pairs = q.reshape(-1, 4, 2, 32)
    np.bitwise_and(qs, 15, out=pairs[:, :, 0])
    np.right_shift(qs, 4, out=pairs[:, :, 1])
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    groups = q.reshape(-1, 8, 32)
    groups |= ((b[:, 16:48][:, None, :] >> shifts) & 1) << 4
    _unpack_k(b, s, m)


def _unpack_coded(name: str, b: Bytes, q: Bytes, s: Floats, _m: Floats) -> None:
    q[:], s[:] = CODED_TYPES[name].unpack(b)


_UNPACKERS: Final[dict[str, Callable[[Bytes, Bytes, Floats, Floats], None]]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q4_K": _unpack_q4_k,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q5_K": _unpack_q5_k,
    "Q8_0": _unpack_q8_0,
    **{name: partial(_unpack_coded, name) for name in CODED_TYPES},
}
