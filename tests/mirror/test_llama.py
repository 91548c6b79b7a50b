"""A tiny Llama on the mirror, as it is served: the tokens of the CPU, and no fault."""

from __future__ import annotations

import pytest

from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import GREEDY, Driver

from .mirror import mirror_device
from .runners import LLAMA, PROMPT, Ahead, load_driver, on_cpu


def mixed_steps(
    driver: Driver, ahead: Ahead | None = None, sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """Two requests: a prompt in two chunks, a mixed step, decodes of one and of both."""
    ahead = ahead or Ahead(driver)
    first, second = ahead.start(PROMPT[:6], sampling), ahead.start(PROMPT[:11], sampling)
    ahead.go([(first, 4)])
    ahead.prompt(first)
    ahead.go([(second, 11), (first, 1)])
    ahead.decode(first, second, num=3)
    ahead.decode(second)
    ahead.decode(first, second)
    return ahead.finish(first, second)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with on_cpu():
        return mixed_steps(load_driver(LLAMA, None))


@pytest.mark.parametrize(
    ("triton", "record"),
    [
        pytest.param(True, True, id="recorded"),
        pytest.param(True, False, id="eager", marks=pytest.mark.slow),
        pytest.param(False, True, id="recorded without Triton"),
        pytest.param(False, False, id="eager without Triton"),
    ],
)
def test_mixed_steps_with_three_in_flight_give_the_tokens_of_the_cpu(triton, record, expected):
    with mirror_device(triton=triton) as mirror:
        driver = load_driver(LLAMA, mirror, record=record)
        assert mixed_steps(driver) == expected
        if not triton:  # with two in flight, as in a server, no launch waits for the step before
            assert mixed_steps(driver, Ahead(driver, 1, mirror)) == expected
