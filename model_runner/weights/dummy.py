"""Random weights, for benchmarks and tests without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

_BOUND: Final = 0.02


class DummyStore:
    """Any tensor in any shape, uniform in +-0.02.

    Never zeros: a model of zeros is faster than real ones where kernels or memory compress, and its logits are equal.
    The values depend on seed and name only, so every rank and every run has the same.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def names(self) -> set[str]:
        """See `TensorStore`; nothing is left over."""
        return set()

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorStore`."""
        return wanted

    def read(self, name: str, out: Tensor) -> None:
        """See `TensorStore`."""
        digest = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        out.copy_(torch.empty(out.shape, dtype=torch.float32).uniform_(-_BOUND, _BOUND, generator=generator))

    def describe(self, name: str) -> str:
        """See `TensorStore`."""
        return "dummy weights"
