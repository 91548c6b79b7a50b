"""Common part of the recurrent state layers in plain torch: the convolution, and chunks of tokens."""

# Shapes: T tokens, K channels, L taps, N chunks of C tokens.

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK: Final = 64
LEAST_CHUNKED: Final = 8
"""With fewer tokens the chunks' matmuls do not pay."""


def convolved(whole: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu of the causal convolution of each channel: [L - 1 + T, K] -> [T, K] float32."""
    windows = whole.to(torch.float32).unfold(0, len(taps), 1)  # [T, K, L]
    sums = (windows * taps.to(torch.float32).T).sum(dim=-1)
    return F.silu(sums if bias is None else sums + bias)


def in_chunks(x: Tensor) -> Tensor:
    """[T, H, ...] -> [N, H, C, ...]; tokens after the last are zeros, which change no state."""
    num_chunks = -(-len(x) // CHUNK)
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, num_chunks * CHUNK - len(x)))
    return torch.unflatten(padded, 0, (num_chunks, CHUNK)).transpose(1, 2)


def decays_between(since: Tensor) -> Tensor:
    """Logarithms of decays since a chunk's begin, [..., C] -> the decay from each token to each later one, [..., C, C].

    Row t has the decays of what tokens up to t have written; the others are zeros.
    """
    between = since.unsqueeze(-1) - since.unsqueeze(-2)
    return between.masked_fill(~torch.ones_like(between, dtype=torch.bool).tril(), -torch.inf).exp()
