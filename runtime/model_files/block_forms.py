"""`BlockForm`: how whole numbers in blocks of 32 stand for weights, for each GGUF format that is kept so in memory.

A weight is number * scale + minimum, with a scale and a minimum for 32 neighbouring inputs of an output. Formats of
GGUF that say the same in other words keep their numbers. The others (a scale for 16 numbers) are rounded once more, to
8 bits, which is a quarter of the step that they have already been rounded to, or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

BLOCK_LEN: Final = 32
"""Inputs that share a scale."""


class BlockForm(NamedTuple):
    """One form.

    Attributes:
        bits: of a number, 4 or 8.
        zero: the number that means 0, where blocks have no minimum of their own: it is -zero * scale.
        has_minima: whether blocks have one.
        is_exact: whether the numbers are those of the file.
    """

    bits: Literal[4, 8]
    zero: int
    has_minima: bool
    is_exact: bool = True

    def num_bytes(self, rows: int, columns: int) -> int:
        """Memory of a weight, as kernels want it: scales and minima have 16 bits."""
        return rows * columns * self.bits // 8 + rows * (columns // BLOCK_LEN) * (4 if self.has_minima else 2)

    def is_held_like(self, other: BlockForm) -> bool:
        """Whether weights of both can be one."""
        return self._replace(is_exact=True) == other._replace(is_exact=True)


WIDEST: Final = BlockForm(8, 0, has_minima=True)
"""Can hold the numbers of all others: what several become that are one weight."""
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
"""By the names of GGUF."""
