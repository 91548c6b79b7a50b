"""Each ability of the runner on the mirror: the results of the CPU, and no fault.

To see which scenarios ran with what: `pytest tests/mirror -m "slow or not slow" --collect-only -q`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.model_runner.conftest import Driver

from .mirror import Mirror, mirror_device
from .runners import LLAMA, load_driver, on_cpu
from .scenarios import SCENARIOS, Results, adapters, assert_idle, assert_same, load_adapted

MODES: dict[str, dict[str, Any]] = {
    "recorded": {},
    "eager": {"record": False},
    "without Triton": {"triton": False},
}
SIZES: dict[str, Any] = {"num_host_pages": 8, "speculative": "ngram"}


@pytest.fixture(scope="module")
def expected() -> dict[str, Results]:
    """By the CPU."""
    with on_cpu():
        driver = load_driver(LLAMA, None, **SIZES)
        return {name: scenario(driver) for name, scenario in SCENARIOS.items()}


@pytest.fixture(scope="module", params=list(MODES))
def served(request: pytest.FixtureRequest, expected: object) -> Iterator[tuple[Mirror, Driver]]:
    """A mirror and a driver on it, for all scenarios."""
    options = dict(MODES[request.param])
    with mirror_device(triton=options.pop("triton", True)) as mirror:
        yield mirror, load_driver(LLAMA, mirror, **SIZES, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_scenario_gives_the_results_of_the_cpu(name, served, expected):
    mirror, driver = served
    found = SCENARIOS[name](driver)
    mirror.check()
    assert_same(found, expected[name])
    assert_idle(driver)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_adapters_give_the_tokens_of_the_cpu(mode, tmp_path):
    options = dict(MODES[mode])
    expected = adapters(load_adapted(None, tmp_path))
    with mirror_device(triton=options.pop("triton", True)) as mirror:
        assert_same(adapters(load_adapted(mirror, tmp_path, **options)), expected)
        # A load waits for the device: it is rare, and page-locked copies of adapters would cost the host more.
        waits = mirror.faults.take()
        assert all(fault.kind == "wait" and "adapter_store" in fault.where for fault in waits), waits
