"""When requests arrive: all at once, or a renewal process with gamma-distributed gaps (Poisson for burstiness 1)."""

from __future__ import annotations

import math

import numpy as np

from ....runtime.errors import ConfigError


def arrival_offsets(num_requests: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due, ascending, the first at 0.

    Args:
        num_requests: how many.
        request_rate: mean requests per second; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is Poisson, below 1 burstier, above 1 more even.
        seed: equal seeds give equal schedules.

    Raises:
        ConfigError: rate or burstiness not above 0.
    """
    if not request_rate > 0:
        raise ConfigError(
            f"--request-rate is {request_rate}, but it must be above 0 ('inf' sends all at once)"
        )
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"--burstiness is {burstiness}, but it must be above 0; 1 is a Poisson process")
    if math.isinf(request_rate) or num_requests == 0:
        return [0.0] * num_requests
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=num_requests - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
