"""`BlockForm`: how integers in blocks of 32 represent weights, for each GGUF format that stays quantized in memory.

A weight is number * scale + minimum, with one scale and one minimum per 32 neighboring inputs of an output. In some
formats the number is the code of a value in a table. GGUF formats that are equivalent to this keep their numbers. The
others (one scale per 16 numbers) are rounded again to 8 bits. The step of that rounding is at most a quarter of the
step of the file's own rounding.

Q4_K, Q5_K and Q6_K also have a layout of their own, with the numbers and the bytes of the file (`super_blocks.h`). It
needs whole superblocks of 256 inputs; the form is for parts of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

BLOCK_LEN: Final = 32
"""Inputs that share a scale."""
SUPERBLOCK_LEN: Final = 256
"""Inputs of a block of K-quants, whose scales share a factor."""


class BlockForm(NamedTuple):
    """One form.

    Attributes:
        bits: per number, 4 or 8.
        zero: the number that represents 0, if blocks have no minimum of their own: the minimum is -zero * scale.
        has_minima: whether blocks have a minimum.
        is_exact: whether the numbers are those of the file.
        table: the values of the 16 numbers of 4 bits; None: numbers are their own values. `zero`
            differs from each by at most 127.
        superblock_bytes: bytes of 256 inputs in the layout of the file; 0: there is no kernel for it.
    """

    bits: Literal[4, 8]
    zero: int
    has_minima: bool
    is_exact: bool = True
    table: tuple[int, ...] | None = None
    superblock_bytes: int = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Memory of a weight in the kernels' layout: scales and minima have 16 bits, except in superblocks."""
        if self.superblock_bytes and columns % SUPERBLOCK_LEN == 0:
            return rows * (columns // SUPERBLOCK_LEN) * self.superblock_bytes
        return rows * columns * self.bits // 8 + rows * (columns // BLOCK_LEN) * (4 if self.has_minima else 2)

    def is_held_like(self, other: BlockForm) -> bool:
        """Whether weights of both forms can be stored as one, in blocks."""
        mine, others = (one._replace(is_exact=True, superblock_bytes=0) for one in (self, other))
        return mine == others


WIDEST: Final = BlockForm(8, 0, has_minima=True)
"""Can hold the numbers of all other forms: the form of fused modules with different forms."""
INT8: Final = BlockForm(8, 128, has_minima=False)
INT4: Final = BlockForm(4, 0, has_minima=True)
TERNARY: Final = BlockForm(4, 1, has_minima=False)


def _with_table(values: Sequence[int]) -> BlockForm:
    """The form of codes of these values; codes that do not occur are 0."""
    zero = -min(values)
    table = tuple(zero + value for value in values)
    return BlockForm(4, zero, has_minima=False, table=table + (zero,) * (16 - len(table)))


def _with_signs(magnitudes: Sequence[int]) -> BlockForm:
    """The form of codes of 8 magnitudes and a sign, which is the upper bit."""
    padded = [*magnitudes, *[0] * (8 - len(magnitudes))]
    return _with_table([*padded, *(-value for value in padded)])


IQ4: Final = _with_table([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
MXFP4: Final = _with_signs([0, 1, 2, 3, 4, 6, 8, 12])
"""4-bit floats (a sign, two bits of exponent, one of mantissa); a value is twice the float."""
IQ3_S: Final = _with_signs([1, 3, 5, 7, 9, 11, 13, 15])
IQ3_XXS: Final = _with_signs([4, 12, 20, 28, 36, 44, 52, 62])
IQ2: Final = _with_signs([8, 25, 43])
IQ1: Final = _with_table([-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7])
"""-1, 0 and 1, an eighth more or less; a value is 8 times as much."""

GGUF_FORMS: Final[Mapping[str, BlockForm]] = {
    "Q4_0": BlockForm(4, 8, has_minima=False),
    "Q4_1": BlockForm(4, 0, has_minima=True),
    "Q4_K": BlockForm(4, 0, has_minima=True, superblock_bytes=144),
    "Q5_0": BlockForm(8, 16, has_minima=False),
    "Q5_1": BlockForm(8, 0, has_minima=True),
    "Q5_K": BlockForm(8, 0, has_minima=True, superblock_bytes=176),
    "Q8_0": INT8,
    "IQ4_NL": IQ4,
    "IQ4_XS": IQ4,
    "MXFP4": MXFP4,
    "IQ3_S": IQ3_S,
    "IQ3_XXS": IQ3_XXS,
    "IQ2_XXS": IQ2,
    "IQ1_S": IQ1,
    "TQ1_0": TERNARY,
    "TQ2_0": TERNARY,
    "Q2_K": INT8._replace(is_exact=False),
    "Q3_K": INT8._replace(is_exact=False),
    "Q6_K": INT8._replace(is_exact=False, superblock_bytes=210),
    "IQ2_S": INT8._replace(is_exact=False),
    "IQ2_XS": INT8._replace(is_exact=False),
    "IQ1_M": INT8._replace(is_exact=False),
    "NVFP4": INT8._replace(is_exact=False),
}
"""By GGUF's names."""
