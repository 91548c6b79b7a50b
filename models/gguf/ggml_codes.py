"""`CODED_TYPES`: GGUF formats in which a number of 1 to 4 bits stands for a value of a table of at most 16.

`unpack` gives a code of 4 bits for each number, whatever the file has for it (an index of a grid and signs, digits in
base 3), and the scale of each group: weight = (table[code] - zero) * scale. Formats with a scale per 32 numbers are
multiplied in this form (`BlockForm`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..spec.quantization import IQ1, IQ2, IQ3_S, IQ3_XXS, IQ4, MXFP4, TERNARY, BlockForm
from .ggml_grids import GridName, grid

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


Integers = npt.NDArray[np.integer[Any]]

_NIBBLE: Final = np.uint8(15)
_HALF: Final = np.float32(0.5)
_QUARTER: Final = np.float32(0.25)
_EIGHTH: Final = np.float32(0.125)
_SIGN: Final = 8
"""Bit of a code that negates a magnitude of IQ2 and IQ3, or the offset of IQ1."""


class CodedType(NamedTuple):
    """One format.

    Attributes:
        form: the table and its zero.
        unpack: [N, block_bytes] -> codes [N, block_len] uint8, scales [N, groups] float32.
    """

    form: BlockForm
    unpack: Callable[[Bytes], tuple[Bytes, Floats]]

    def dequantize(self, b: Bytes, out: Floats) -> None:
        """[N, block_bytes] -> [N, block_len] float32."""
        codes, scales = self.unpack(b)
        np.take(_values(self.form), codes, out=out)
        groups = out.reshape(*scales.shape, -1)
        groups *= scales[:, :, None]


@functools.cache
def _values(form: BlockForm) -> Floats:
    table = np.arange(16) if form.table is None else np.array(form.table)
    return (table - form.zero).astype(np.float32)


# ---------------------------------------------------------------- tables

# Shapes below: b [N, block_bytes] uint8; results as of `CodedType.unpack`.


def _nibbles(qs: Bytes) -> Bytes:
    codes = np.empty((len(qs), 32), dtype=np.uint8)
    nibbles(qs, codes)
    return codes


def _iq4_nl(b: Bytes) -> tuple[Bytes, Floats]:
    return _nibbles(b[:, 2:]), f16(b[:, :2])


def _iq4_xs(b: Bytes) -> tuple[Bytes, Floats]:
    """Scales of 6 bits: 8 pairs of upper bits in 2 bytes, then 8 nibbles of lower bits."""
    high = b[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_pairs(b[:, 4:8]) | high << 4).astype(np.float32) - 32
    return _nibbles(b[:, 8:].reshape(-1, 16)).reshape(-1, 256), f16(b[:, :2]) * scales


def _mxfp4(b: Bytes) -> tuple[Bytes, Floats]:
    """Exponents of scales; values are twice the floats."""
    return _nibbles(b[:, 1:]), np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)


def _nvfp4(b: Bytes) -> tuple[Bytes, Floats]:
    """Scales are positive e4m3 of 16 numbers each; values are twice the floats."""
    qs = b[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate([qs & _NIBBLE, qs >> 4], axis=2).reshape(-1, 64)
    exponents, mantissas = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    scales = np.where(
        exponents == 0,
        np.ldexp(mantissas, -10),
        np.ldexp(mantissas + 8, exponents - 11),
    )
    return codes, np.where(b[:, :4] == 0x7F, np.float32(0), scales)


def _pairs(b: Bytes) -> Bytes:
    """The nibbles of each byte, the low one first: [N, k] -> [N, 2k]."""
    return (b[:, :, None] >> np.array([0, 4], dtype=np.uint8)).reshape(len(b), -1) & _NIBBLE


# ---------------------------------------------------------------- base 3


def _digits(b: Bytes, count: int) -> Bytes:
    """`count` digits of base 3 per byte, which is a fraction of 256: [N, k] -> [N, count * k], first digits first."""
    powers = np.array([1, 3, 9, 27, 81][:count], dtype=np.uint8)
    shifted = b[:, None, :] * powers[:, None]  # modulo 256
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(b), -1)


def _tq1_0(b: Bytes) -> tuple[Bytes, Floats]:
    parts = [_digits(b[:, :32], 5), _digits(b[:, 32:48], 5), _digits(b[:, 48:52], 4)]
    return np.concatenate(parts, axis=1), f16(b[:, 52:])


def _tq2_0(b: Bytes) -> tuple[Bytes, Floats]:
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (b[:, :64].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 256), f16(b[:, 64:])


# ---------------------------------------------------------------- grids


@functools.cache
def _packed_grid(name: GridName) -> npt.NDArray[Any]:
    """The tuples of a grid as one integer each, so that a look-up copies one item."""
    codes = grid(name)
    return codes.view(np.uint32 if codes.shape[1] == 4 else np.uint64)[:, 0]


@functools.cache
def _packed_signs() -> npt.NDArray[np.uint64]:
    """The sign bits of 8 codes for each byte of signs."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(_SIGN)).view(np.uint64)[:, 0]


@functools.cache
def _even_signs() -> Bytes:
    """The 8 signs of which 7 are stored: their number is even."""
    seven = np.arange(128, dtype=np.uint8)
    odd: Bytes = np.bitwise_xor.reduce(np.unpackbits(seven[:, None], axis=1), axis=1)
    return seven | odd << np.uint8(7)


def _from_grid(name: GridName, indices: Integers, signs: Bytes) -> Bytes:
    """Codes of 256 numbers: indices [N, 32 or 64] of the grid, signs [N, 32] one bit per number."""
    together = np.ascontiguousarray(_packed_grid(name)[indices]).view(np.uint64)
    together |= _packed_signs()[signs]
    return together.view(np.uint8)


def _high_bits(qs: Bytes, high: Integers) -> Integers:
    """Indices of more than 8 bits."""
    return qs | high.astype(np.uint16) << 8


def _bits(b: Bytes, width: int) -> Bytes:
    """The parts of `width` bits of each byte, the lowest first: [N, k] -> [N, 8 / width * k]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (b[:, :, None] >> shifts).reshape(len(b), -1) & np.uint8((1 << width) - 1)


def _signs_of(words: npt.NDArray[np.uint32]) -> Bytes:
    """Four times 7 bits of signs per word: [N, 8] -> [N, 32]."""
    shifts = np.array([0, 7, 14, 21], dtype=np.uint32)
    signs: Bytes = _even_signs()[(words[:, :, None] >> shifts & 127).reshape(len(words), -1)]
    return signs


def _iq2_xxs(b: Bytes) -> tuple[Bytes, Floats]:
    words = np.ascontiguousarray(b[:, 2:]).view("<u4").reshape(-1, 8, 2)
    indices, rest = np.ascontiguousarray(words[:, :, 0]).view(np.uint8), words[:, :, 1]
    scales = f16(b[:, :2]) * ((rest >> 28).astype(np.float32) + _HALF) * _QUARTER
    return _from_grid("IQ2_XXS", indices, _signs_of(rest)), scales


def _iq2_xs(b: Bytes) -> tuple[Bytes, Floats]:
    qs = np.ascontiguousarray(b[:, 2:66]).view("<u2")
    codes = _from_grid("IQ2_XS", qs & 511, _even_signs()[qs >> 9])
    return codes, f16(b[:, :2]) * (_pairs(b[:, 66:]).astype(np.float32) + _HALF) * _QUARTER


def _iq2_s(b: Bytes) -> tuple[Bytes, Floats]:
    indices = _high_bits(b[:, 2:34], _bits(b[:, 66:74], 2))
    scales = f16(b[:, :2]) * (_pairs(b[:, 74:]).astype(np.float32) + _HALF) * _QUARTER
    return _from_grid("IQ2_S", indices, b[:, 34:66]), scales


def _iq3_xxs(b: Bytes) -> tuple[Bytes, Floats]:
    rest = np.ascontiguousarray(b[:, 66:]).view("<u4")
    scales = f16(b[:, :2]) * ((rest >> 28).astype(np.float32) + _HALF) * _HALF
    return _from_grid("IQ3_XXS", b[:, 2:66], _signs_of(rest)), scales


def _iq3_s(b: Bytes) -> tuple[Bytes, Floats]:
    indices = _high_bits(b[:, 2:66], _bits(b[:, 66:74], 1))
    scales = f16(b[:, :2]) * (_pairs(b[:, 106:]).astype(np.float32) * 2 + 1)
    return _from_grid("IQ3_S", indices, b[:, 74:106]), scales


def _iq1_s(b: Bytes) -> tuple[Bytes, Floats]:
    """The offset of all numbers of a group is the upper bit of its two bytes."""
    high = np.ascontiguousarray(b[:, 34:]).view("<u2")
    upper = (high[:, :, None] >> np.array([0, 3, 6, 9], dtype=np.uint16)).reshape(len(b), -1) & 7
    signs = np.repeat((high >> 15).astype(np.uint8) * 255, 4, axis=1)
    scales = f16(b[:, :2]) * ((high >> 12 & 7).astype(np.float32) * 2 + 1) * _EIGHTH
    return _from_grid("IQ1_S", _high_bits(b[:, 2:34], upper), signs), scales


def _iq1_m(b: Bytes) -> tuple[Bytes, Floats]:
    """The half that scales all is in the upper 4 bits of 4 words, each with 4 scales of 3 bits."""
    words = np.ascontiguousarray(b[:, 48:]).view("<u2")
    high = _pairs(b[:, 32:48])
    half = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    factors = (words[:, :, None] >> np.array([0, 3, 6, 9], dtype=np.uint16)).reshape(len(b), -1) & 7
    scales = (
        half.view(np.float16).astype(np.float32)[:, None] * (factors.astype(np.float32) * 2 + 1) * _EIGHTH
    )
    return _from_grid("IQ1_S", _high_bits(b[:, :32], high & 7), (high >> np.uint8(3)) * np.uint8(255)), scales


CODED_TYPES: Final[dict[str, CodedType]] = {
    "IQ4_NL": CodedType(IQ4, _iq4_nl),
    "IQ4_XS": CodedType(IQ4, _iq4_xs),
    "MXFP4": CodedType(MXFP4, _mxfp4),
    "NVFP4": CodedType(MXFP4, _nvfp4),
    "TQ1_0": CodedType(TERNARY, _tq1_0),
    "TQ2_0": CodedType(TERNARY, _tq2_0),
    "IQ3_S": CodedType(IQ3_S, _iq3_s),
    "IQ3_XXS": CodedType(IQ3_XXS, _iq3_xxs),
    "IQ2_S": CodedType(IQ2, _iq2_s),
    "IQ2_XS": CodedType(IQ2, _iq2_xs),
    "IQ2_XXS": CodedType(IQ2, _iq2_xxs),
    "IQ1_M": CodedType(IQ1, _iq1_m),
    "IQ1_S": CodedType(IQ1, _iq1_s),
}
"""By GGUF's names."""
