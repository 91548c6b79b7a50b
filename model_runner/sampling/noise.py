"""Sampling noise that is a function of (seed, position, token) only.

The argmax of logits plus Gumbel noise is a draw from softmax(logits) (the Gumbel-max trick). Here the noise of a token
is a counter-based hash of the request's seed, the sampled position and the token's id. No generator has a state, so
the same request draws the same tokens alone, batched, chunked, after a retraction, after a crash, or with the
vocabulary sharded over GPUs.

The hash is lowbias32 (C. Wellons, "hash-prospector": two rounds of multiply and xor-shift), keyed before each round.
Noise is bounded by ln(2**32) = 22.2, so a token with less than 1e-9 of the probability of all others is never drawn.
"""

# Shapes: B requests, V tokens of the vocabulary.

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_UNIT: Final = 2.0**-31 * (1 - 2.0**-23)  # maps 31 bits into (0, 1); 1 is excluded also after rounding


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Hash seed and position of each request, on the host: [B], [B] -> [B, 2] int32 keys for `gumbel_noise`."""
    mixed = _splitmix64(_splitmix64(seeds) ^ positions.astype(np.uint64))
    return mixed.view(np.int32).reshape(-1, 2)


def coins(keys: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each request, independent of its noise: [B, 2] from `noise_keys` -> [B]."""
    mixed = _splitmix64(np.ascontiguousarray(keys).view(np.uint64)[:, 0] ^ _MIX_1)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token.

    Args:
        keys: [B, 2] int32, device, from `noise_keys`.

    Returns:
        [B, V] float32, in [-2.8, 22.2].
    """
    return noise_of(keys, torch.arange(vocab_size, dtype=torch.int32, device=keys.device))


def noise_of(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The same noise for some tokens only: [B, 2] int32, [k] int32 -> [B, k] float32."""
    x = token_ids.mul(_signed(0x9E3779B1)).bitwise_xor(keys[:, :1])
    shifted = torch.empty_like(x)
    _xor_shift(x, 16, shifted)
    x.mul_(0x7FEB352D)
    _xor_shift(x, 15, shifted)
    x.add_(keys[:, 1:]).mul_(_signed(0x846CA68B))
    _xor_shift(x, 16, shifted)
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5)
    # -log1p(-u) is the exponential variate. Small u give the largest noise, and there float32 has full precision.
    return uniform.mul_(-_UNIT).log1p_().neg_().log_().neg_()


def _xor_shift(x: Tensor, bits: int, scratch: Tensor) -> None:
    """x ^= x >> bits, unsigned: torch shifts int32 arithmetically, so the copies of the sign bit are masked off."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned 32-bit number."""
    return value - (1 << 32)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
