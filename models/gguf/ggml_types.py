"""The number formats of GGUF tensors: the sizes of their blocks, and their conversion to float32.

Called by the GGUF reader (sizes) and by weight loading (`dequantize`). The layouts are those of ggml
(llama.cpp:ggml/src/ggml-common.h): a tensor row is an integral number of blocks, and all blocks of a format have the
same size, so rows can be sliced and converted separately.

A format that is known but not converted here still has its sizes, so that a file with it is checked in full and
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from ...runtime.errors import ConfigError
from .ggml_codes import CODED_TYPES, Bytes, Floats, f16, nibbles

_CHUNK_ELEMENTS: Final = 1 << 17
"""Elements converted at a time: temporaries stay in the L2 cache, and take about 1 MB besides the result."""


class GGMLType(NamedTuple):
    """One number format of ggml."""

    name: str
    block_len: int  # elements per block
    block_bytes: int

    def row_bytes(self, row_len: int) -> int:
        """Bytes of a row of `row_len` elements, which must be a multiple of the block length."""
        return row_len // self.block_len * self.block_bytes


GGML_TYPES: Final[dict[int, GGMLType]] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
}
"""The formats by their number in a file."""


def check_convertible(ggml_type: GGMLType) -> None:
    """Check that `dequantize` has a conversion for this format.

    Raises:
        ConfigError: it has none.
    """
    if ggml_type.name not in _CONVERTERS:
        raise ConfigError(
            f"tensors of type {ggml_type.name} cannot be read; supported are {', '.join(_CONVERTERS)}: "
            "use another quantization of this model, for example Q4_K_M or Q8_0"
        )


def dequantize(raw: Bytes, ggml_type: GGMLType) -> Floats:
    """Convert rows of blocks to float32.

    Args:
        raw: [..., row_bytes] uint8; any leading shape, also a slice of a tensor's rows.
        ggml_type: the format of the blocks.

    Returns:
        [..., row_len] float32, newly allocated.

    Raises:
        ConfigError: no conversion exists for this format.
    """
    check_convertible(ggml_type)
    convert = _CONVERTERS[ggml_type.name]
    blocks = np.ascontiguousarray(raw).reshape(-1, ggml_type.block_bytes)
    out = np.empty((blocks.shape[0], ggml_type.block_len), dtype=np.float32)
    step = max(1, _CHUNK_ELEMENTS // ggml_type.block_len)
    for start in range(0, blocks.shape[0], step):
        convert(blocks[start : start + step], out[start : start + step])
    row_len = raw.shape[-1] // ggml_type.block_bytes * ggml_type.block_len
    return out.reshape(*raw.shape[:-1], row_len)


# Shapes below: b [N, block_bytes] uint8 in, out [N, block_len] float32 to fill. Within a block of 32, element
# i of the first half is the low nibble of byte i, element 16 + i its high nibble.


def fifth_bits(qh: Bytes) -> Bytes:
    """The 32 high bits of a block of 5-bit numbers, [N, 4] -> [N, 32], each 0 or 16."""
    bits: Bytes = np.unpackbits(qh, axis=1, bitorder="little")
    return bits * np.uint8(16)


def _convert_f32(b: Bytes, out: Floats) -> None:
    out[:] = b.view(np.float32)


def _convert_f16(b: Bytes, out: Floats) -> None:
    out[:] = b.view(np.float16)


def _convert_bf16(b: Bytes, out: Floats) -> None:
    # bfloat16 is the upper half of a float32.
    np.left_shift(b.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _convert_q4_0(b: Bytes, out: Floats) -> None:
    nibbles(b[:, 2:], out)
    out -= 8
    out *= f16(b[:, :2])


def _convert_q4_1(b: Bytes, out: Floats) -> None:
    nibbles(b[:, 4:], out)
    out *= f16(b[:, :2])
    out += f16(b[:, 2:4])


def _convert_q5_0(b: Bytes, out: Floats) -> None:
    nibbles(b[:, 6:], out)
    out += fifth_bits(b[:, 2:6])
    out -= 16
    out *= f16(b[:, :2])


def _convert_q5_1(b: Bytes, out: Floats) -> None:
    nibbles(b[:, 8:], out)
    out += fifth_bits(b[:, 4:8])
    out *= f16(b[:, :2])
    out += f16(b[:, 2:4])


def _convert_q8_0(b: Bytes, out: Floats) -> None:
    np.copyto(out, b[:, 2:].view(np.int8))
    out *= f16(b[:, :2])


def scales_and_mins_6bit(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the 8 scales and 8 minima, 6 bits each, of Q4_K and Q5_K: [N, 12] -> twice [N, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low 6 bits. Bytes 8-11 hold the low 4 bits of
    scales 4-7 (low nibble) and minima 4-7 (high nibble); their top 2 bits are the top 2 bits of bytes 0-3 and 4-7.
    """
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    mins = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return scales, mins


def _affine_k(b: Bytes, out: Floats) -> None:
    """Apply the scales and minima of Q4_K and Q5_K to the 8 groups of 32 numbers already in `out`."""
    scales, mins = scales_and_mins_6bit(b[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    groups *= (f16(b[:, :2]) * scales)[:, :, None]
    groups -= (f16(b[:, 2:4]) * mins)[:, :, None]


def _convert_q4_k(b: Bytes, out: Floats) -> None:
    # Each 32 bytes hold two groups of 32: the low nibbles, then the high ones.
    qs = b[:, 16:].reshape(-1, 4, 32)
    pairs = out.reshape(-1, 4, 2, 32)
    np.copyto(pairs[:, :, 0], qs & 15)
    np.copyto(pairs[:, :, 1], qs >> 4)
    _affine_k(b, out)


def _convert_q5_k(b: Bytes, out: Floats) -> None:
    qs = b[:, 48:].reshape(-1, 4, 32)
    pairs = out.reshape(-1, 4, 2, 32)
    np.copyto(pairs[:, :, 0], qs & 15)
    np.copyto(pairs[:, :, 1], qs >> 4)
    # Bit g of high byte i belongs to element i of group g.
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    groups = out.reshape(-1, 8, 32)
    groups += ((b[:, 16:48][:, None, :] >> shifts) & 1) << 4
    _affine_k(b, out)


def _convert_q6_k(b: Bytes, out: Floats) -> None:
    # Two halves of 128 numbers; in each, four groups of 32 share 64 bytes of low nibbles and 32 bytes of high
    # bit pairs: group 0 and 1 are low nibbles of bytes 0-31 and 32-63, group 2 and 3 their high nibbles.
    low = b[:, :128].reshape(-1, 2, 2, 32)
    high = b[:, 128:192].reshape(-1, 2, 32)
    groups = out.reshape(-1, 2, 4, 32)
    for g in range(4):
        nibble = low[:, :, g & 1] >> (4 * (g >> 1)) & 15
        np.copyto(groups[:, :, g], nibble | ((high >> (2 * g)) & 3) << 4)
    out -= 32
    scales = f16(b[:, 208:]) * b[:, 192:208].view(np.int8)  # 16 scales, one for 16 numbers
    sixteens = out.reshape(-1, 16, 16)
    sixteens *= scales[:, :, None]


def _convert_q2_k(b: Bytes, out: Floats) -> None:
    # Two halves of 128 numbers, 32 bytes each: bits 2g and 2g+1 of byte i are element i of group g. One byte
    # of scale (low nibble) and minimum (high nibble) for 16 numbers.
    qs = b[:, 16:80].reshape(-1, 2, 32)
    groups = out.reshape(-1, 2, 4, 32)
    for g in range(4):
        np.copyto(groups[:, :, g], (qs >> (2 * g)) & 3)
    sixteens = out.reshape(-1, 16, 16)
    sixteens *= (f16(b[:, 80:82]) * (b[:, :16] & 15))[:, :, None]
    sixteens -= (f16(b[:, 82:84]) * (b[:, :16] >> 4))[:, :, None]


def _convert_q3_k(b: Bytes, out: Floats) -> None:
    # Low two bits as in Q2_K; the third, inverted (0 means subtract 4), is bit `half * 4 + g` of high byte i.
    high = b[:, :32]
    qs = b[:, 32:96].reshape(-1, 2, 32)
    groups = out.reshape(-1, 2, 4, 32)
    for half in range(2):
        for g in range(4):
            low_bits = (qs[:, half] >> (2 * g)) & 3
            np.copyto(groups[:, half, g], low_bits | ((high >> (half * 4 + g)) & 1) << 2)
    out -= 4
    # 16 signed 6-bit scales: the low nibbles of bytes 0-7 are the low bits of scales 0-7, the high nibbles of
    # 8-15; bytes 8-11 hold the upper bit pairs, pair s of byte i for scale 4s + i.
    packed = b[:, 96:108]
    low4 = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high2 = np.concatenate([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low4 | high2 << 4).astype(np.float32) - 32
    sixteens = out.reshape(-1, 16, 16)
    sixteens *= (f16(b[:, 108:110]) * scales)[:, :, None]


_CONVERTERS: Final[dict[str, Callable[[Bytes, Floats], None]]] = {
    "F32": _convert_f32,
    "F16": _convert_f16,
    "BF16": _convert_bf16,
    "Q4_0": _convert_q4_0,
    "Q4_1": _convert_q4_1,
    "Q5_0": _convert_q5_0,
    "Q5_1": _convert_q5_1,
    "Q8_0": _convert_q8_0,
    "Q2_K": _convert_q2_k,
    "Q3_K": _convert_q3_k,
    "Q4_K": _convert_q4_k,
    "Q5_K": _convert_q5_k,
    "Q6_K": _convert_q6_k,
    **{name: coded.dequantize for name, coded in CODED_TYPES.items()},
}
