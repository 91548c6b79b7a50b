"""Random weights, for benchmarks and tests without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from .reader import Slice, cut_from_whole

_BOUND: Final = 0.02
_EXPONENT: Final = 120
"""The exponent of a scale of 1/128, with 127 added."""
_BLOCK: Final = 4_194_301
"""Values drawn per tensor; a larger tensor repeats them. At 120 million values per second, drawing eight billion took a
minute. The count is prime, so no two rows of a matrix begin at the same value and all rows differ."""


class DummyStore:
    """Any tensor in any shape, uniform in +-0.02. Packed integers and 4-bit floats get random bits.

    The values are never all zeros: a model of zeros is faster than a real one where kernels or memory compress, and
    its logits are all equal. The values depend on seed and name only, so all ranks and runs have the same weights.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the tensors that were requested

    def names(self) -> set[str]:
        """Empty, so no tensor is left over."""
        return set()

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        self._shapes[name] = wanted
        return wanted

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        if part is not None:
            cut_from_whole(partial(self.read, name), self._shapes[name], out, part)
            return
        digest = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        if out.dtype == torch.int32:  # packed integers
            words = torch.iinfo(out.dtype)
            out.random_(words.min, words.max, generator=generator)
            return
        if out.dtype == torch.int8:  # one in a byte, of 8 bits or of 4
            out.random_(-8, 8, generator=generator)
            return
        if out.dtype == torch.uint8:  # 4-bit floats, or the exponents of their scales
            out.random_(0, 256, generator=generator) if "scale" not in name else out.fill_(_EXPONENT)
            if not out.dim():  # the number of a layout
                out.zero_()
            return
        drawn = torch.empty(min(out.numel(), _BLOCK), dtype=torch.float32)
        values = drawn.uniform_(-_BOUND, _BOUND, generator=generator).to(out.dtype)
        for place in out.view(-1).split(_BLOCK):
            place.copy_(values[: len(place)])

    def blocks(self, name: str, part: Slice | None = None) -> None:
        """Always None."""

    def describe(self, name: str) -> str:
        return "dummy weights"
