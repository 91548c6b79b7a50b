"""A few storms of `make soak`, and a few seconds of its overload: nothing is lost, and nothing is left."""

from __future__ import annotations

import pytest

from .overload import run_overload
from .soak import WARM_UP_STORMS, run_soak

pytestmark = [pytest.mark.slow, pytest.mark.real_process, pytest.mark.timeout(600)]


def test_a_little_soak(model):
    assert run_soak(model, lambda num_storms: num_storms < WARM_UP_STORMS + 1, num_visits=60) == []


@pytest.mark.parametrize("mode", ["refuse", "queue"])
def test_a_little_overload(model, mode):
    assert run_overload(model, mode, 5.0, timed=False) == []
