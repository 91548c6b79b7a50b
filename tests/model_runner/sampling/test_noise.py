"""Noise is a function of seed, position and token, and is Gumbel distributed."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.model_runner.sampling.noise import gumbel_noise, noise_keys

EULER_GAMMA = 0.5772156649


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return torch.from_numpy(noise_keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64)))


def test_a_row_does_not_depend_on_the_others():
    seeds, positions = [7, 7, 2**63 - 1, 0], [3, 4, 3, 100_000]
    together = gumbel_noise(keys_of(seeds, positions), 1000)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert torch.equal(together[row : row + 1], gumbel_noise(keys_of([seed], [position]), 1000))


def test_a_token_does_not_depend_on_the_size_of_the_vocabulary():
    keys = keys_of([5], [9])
    assert torch.equal(gumbel_noise(keys, 5000)[:, :300], gumbel_noise(keys, 300))


def test_is_fixed_for_all_time():
    """Replays after an upgrade depend on it: changing the hash is changing every seeded answer."""
    noise = gumbel_noise(keys_of([42, 42, 43], [0, 1, 0]), 3)
    expected = [
        [0.549182, 1.715868, -0.038350],
        [-1.147770, 0.227521, 2.460174],
        [0.656903, 0.720692, -0.431599],
    ]
    torch.testing.assert_close(noise, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_is_gumbel_distributed():
    noise = gumbel_noise(keys_of([*range(40)], [11] * 40), 50_000).double()
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - EULER_GAMMA) < 5e-3
    assert abs(noise.var().item() - math.pi**2 / 6) < 1e-2
    # Kolmogorov-Smirnov over all values; 1.63 / sqrt(n) is the 1 % level.
    ordered = noise.flatten().sort().values
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert ((-(-ordered).exp()).exp() - steps).abs().max() < 1.63 / math.sqrt(len(ordered))


def test_neighboring_seeds_positions_and_tokens_are_uncorrelated():
    by_seed = gumbel_noise(keys_of([*range(64)], [5] * 64), 4096)
    by_position = gumbel_noise(keys_of([5] * 64, [*range(64)]), 4096)
    for noise in (by_seed, by_position):
        correlation = torch.corrcoef(noise) - torch.eye(64)
        assert correlation.abs().max() < 6 / math.sqrt(4096)
        shifted = torch.corrcoef(torch.stack((noise[:, 1:].flatten(), noise[:, :-1].flatten())))
        assert abs(shifted[0, 1].item()) < 4 / math.sqrt(64 * 4095)
