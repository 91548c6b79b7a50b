"""`BlockForm`: how integers in blocks of 32 represent weights, for each GGUF format that stays quantized in memory.

A weight is number * scale + minimum, with one scale and one minimum per 32 neighboring inputs of an output. GGUF
formats that are equivalent to this keep their numbers. The others (one scale per 16 numbers) are rounded again to 8
bits. The step of that rounding is at most a quarter of the step of the file's own rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

BLOCK_LEN: Final = 32
"""Inputs that share a scale."""


class BlockForm(NamedTuple):
    """One form.

    Attributes:
        bits: per number, 4 or 8.
        zero: the number that represents 0, if blocks have no minimum of their own: the minimum is -zero * scale.
        has_minima: whether blocks have a minimum.
        is_exact: whether the numbers are those of the file.
    """

    bits: Literal[4, 8]
    zero: int
    has_minima: bool
    is_exact: bool = True

    def num_bytes(self, rows: int, columns: int) -> int:
        """Memory of a weight in the kernels' layout: scales and minima have 16 bits."""
        return rows * columns * self.bits // 8 + rows * (columns // BLOCK_LEN) * (4 if self.has_minima else 2)

    def is_held_like(self, other: BlockForm) -> bool:
        """Whether weights of both forms can be stored as one."""
        return self._replace(is_exact=True) == other._replace(is_exact=True)


WIDEST: Final = BlockForm(8, 0, has_minima=True)
"""Can hold the numbers of all other forms: the form of fused modules with different forms."""
INT8: Final = BlockForm(8, 128, has_minima=False)
INT4: Final = BlockForm(4, 0, has_minima=True)

GGUF_FORMS: Final[Mapping[str, BlockForm]] = {
    "Q4_0": BlockForm(4, 8, has_minima=False),
    "Q4_1": BlockForm(4, 0, has_minima=True),
    "Q4_K": BlockForm(4, 0, has_minima=True),
    "Q5_0": BlockForm(8, 16, has_minima=False),
    "Q5_1": BlockForm(8, 0, has_minima=True),
    "Q5_K": BlockForm(8, 0, has_minima=True),
    "Q8_0": INT8,
    "Q2_K": INT8._replace(is_exact=False),
    "Q3_K": INT8._replace(is_exact=False),
    "Q6_K": INT8._replace(is_exact=False),
}
"""By GGUF's names."""
