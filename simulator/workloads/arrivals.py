"""Arrival times and random lengths: streams of seeded draws, made in blocks because single draws are slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...runtime.errors import ConfigError

_BLOCK: Final = 4096


class Lengths(NamedTuple):
    """A log-normal distribution of lengths, cut at both ends: most are short, a few are long.

    Attributes:
        median: of the uncut distribution.
        sigma: of the logarithm; the mean is median · exp(sigma² / 2).
        low, high: bounds.
    """

    median: float
    sigma: float
    low: int
    high: int

    def draws(self, rng: np.random.Generator) -> Iterator[int]:
        """An endless stream."""
        mean, low, high = math.log(self.median), self.low, self.high
        return _stream(lambda: np.clip(rng.lognormal(mean, self.sigma, _BLOCK), low, high).astype(np.int64))


class Exponential(NamedTuple):
    """An exponential distribution of seconds."""

    mean_s: float

    def draws(self, rng: np.random.Generator) -> Iterator[float]:
        """An endless stream."""
        return _stream(lambda: rng.exponential(self.mean_s, _BLOCK))


def choices(rng: np.random.Generator, values: list[int], weights: list[float]) -> Iterator[int]:
    """An endless stream of values, drawn with these weights."""
    shares = np.array(weights) / sum(weights)
    table = np.array(values)
    return _stream(lambda: table[rng.choice(len(table), _BLOCK, p=shares)])


def popularity(rng: np.random.Generator, count: int, exponent: float) -> Iterator[int]:
    """An endless stream of 0..count-1, where the k-th is drawn with weight 1 / k^exponent (Zipf)."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    bounds = np.cumsum(weights / weights.sum())
    return _stream(lambda: np.minimum(np.searchsorted(bounds, rng.random(_BLOCK)), count - 1))


def arrivals(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """An endless stream of arrival times, the first at 0: gaps are gamma-distributed around 1 / rate.

    Args:
        rate: mean arrivals per second; infinity: all at 0.
        burstiness: 1 is a Poisson process, below 1 burstier, above 1 more even.

    Raises:
        ConfigError: rate or burstiness is not above 0.
    """
    if not rate > 0:
        raise ConfigError(f"--rate is {rate:g}, but it must be above 0 ('inf' lets all arrive at once)")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"--burstiness is {burstiness:g}, but it must be above 0; 1 is a Poisson process")
    return _sums(rate, burstiness, rng)


def _sums(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    now_s = 0.0
    yield now_s
    if math.isinf(rate):
        while True:
            yield now_s
    for gap_s in _stream(lambda: rng.gamma(burstiness, 1.0 / (rate * burstiness), _BLOCK)):
        now_s += gap_s
        yield now_s


def _stream(draw: Callable[[], npt.NDArray[Any]]) -> Iterator[Any]:
    while True:
        yield from draw().tolist()
