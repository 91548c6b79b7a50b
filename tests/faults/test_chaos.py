"""A few random faults of `make chaos`, with the small model."""

from __future__ import annotations

import pytest

from .chaos import run_chaos


@pytest.mark.slow
@pytest.mark.real_process
@pytest.mark.timeout(600)
def test_a_little_chaos(model):
    assert run_chaos(20.0, 1, 8, [str(model), "--dtype", "float32"]) == []
