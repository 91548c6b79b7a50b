"""Random weights, for benchmarks and tests without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from .reader import Slice, cut_from_whole

_BOUND: Final = 0.02
_BLOCK: Final = 4_194_301
"""Numbers drawn for a tensor; larger ones repeat them: at 120 million a second, drawing eight billion took a minute. A
prime, so that no two rows of a matrix begin at the same place and all differ."""


class DummyStore:
    """Any tensor in any shape, uniform in +-0.02; words of quantised weights with any bits.

    Never zeros: a model of zeros is faster than real ones where kernels or memory compress, and its logits are equal.
    The values depend on seed and name only, so every rank and every run has the same.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}  # of what has been asked for

    def names(self) -> set[str]:
        """See `TensorStore`; nothing is left over."""
        return set()

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorStore`."""
        self._shapes[name] = wanted
        return wanted

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """See `TensorStore`."""
        if part is not None:
            cut_from_whole(partial(self.read, name), self._shapes[name], out, part)
            return
        digest = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        if out.dtype == torch.int32:  # words of 4-bit numbers
            words = torch.iinfo(torch.int32)
            out.random_(words.min, words.max, generator=generator)
            return
        drawn = torch.empty(min(out.numel(), _BLOCK), dtype=torch.float32)
        values = drawn.uniform_(-_BOUND, _BOUND, generator=generator).to(out.dtype)
        for place in out.view(-1).split(_BLOCK):
            place.copy_(values[: len(place)])

    def blocks(self, name: str, part: Slice | None = None) -> None:
        """See `TensorStore`; there are none."""

    def describe(self, name: str) -> str:
        """See `TensorStore`."""
        return "dummy weights"
