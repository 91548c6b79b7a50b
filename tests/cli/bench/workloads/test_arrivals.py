"""The arrival process: rate, burstiness, reproducibility."""

import math

import numpy as np
import pytest

from engine import ConfigError
from engine.cli.bench.workloads.datasets import arrival_offsets


def test_infinite_rate_sends_all_at_once():
    assert arrival_offsets(4, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gaps_have_the_asked_mean_and_variation(burstiness, variation):
    gaps = np.diff(arrival_offsets(40_001, 5.0, burstiness, seed=1))

    assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_equal_seeds_give_equal_schedules():
    assert arrival_offsets(50, 3.0, 1.0, seed=7) == arrival_offsets(50, 3.0, 1.0, seed=7)
    assert arrival_offsets(50, 3.0, 1.0, seed=7) != arrival_offsets(50, 3.0, 1.0, seed=8)


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_senseless_values_are_refused_by_name(rate, burstiness):
    with pytest.raises(ConfigError, match="--request-rate" if not rate > 0 else "--burstiness"):
        arrival_offsets(3, rate, burstiness, seed=0)
