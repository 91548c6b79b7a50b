"""Random requests with three steps in flight: they share prefixes, and end while their last steps still run."""

from __future__ import annotations

import random

import pytest

from tests.model_runner.conftest import Driver, Request

from .mirror import mirror_device
from .runners import LLAMA, Ahead, load_driver, on_cpu
from .scenarios import KINDS, assert_idle

MAX_TOKENS = 5


def random_life(driver: Driver, seed: int, num_steps: int) -> list[list[int]]:
    """The answers of all requests, in the order of their starts."""
    rng = random.Random(seed)
    ahead = Ahead(driver)
    running: list[Request] = []
    requests: list[Request] = []
    donors: list[Request] = []
    for number in range(num_steps):
        if number < num_steps - 2 * MAX_TOKENS and driver.rows and rng.random() < 0.5:
            running.append(_start(ahead, rng, running, donors))
            requests.append(running[-1])
        work = []
        for req in rng.sample(running, rng.randint(0, len(running))) or running[:1]:
            left = len(req.tokens) - req.computed
            work.append((req, left if number >= num_steps - 4 else rng.randint(1, left)))
        work.sort(key=lambda item: item[1] == 1)
        ahead.go(work)
        for req in [each for each in running if len(each.output) >= MAX_TOKENS and each not in donors]:
            running.remove(req)
            driver.finish(req)  # while its last steps are in flight
    ahead.settle()
    for req in running:
        driver.finish(req)
    return [req.output for req in requests]


def _start(ahead: Ahead, rng: random.Random, running: list[Request], donors: list[Request]) -> Request:
    """A new request; at times with the first page of one that runs on, which then outlives it."""
    sampling = rng.choice(list(KINDS.values()))
    ready = [req for req in running if min(req.computed, req.prompt_len) >= 4 and req.prefix_len == 0]
    tokens = [rng.randrange(3, 96) for _ in range(rng.randint(1, 14))]
    if not ready or rng.random() < 0.6:
        return ahead.start(tokens, sampling)
    donor = rng.choice(ready)
    if donor not in donors:
        donors.append(donor)
    return ahead.start(donor.tokens[:4] + tokens, sampling, prefix=(donor, 4))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["recorded", "without Triton"])
def test_random_requests_get_the_tokens_of_the_cpu(mode, seed):
    num_steps = 24 if mode == "recorded" else 60
    with on_cpu():
        expected = random_life(load_driver(LLAMA, None), seed, num_steps)
    with mirror_device(triton=mode == "recorded") as mirror:
        driver = load_driver(LLAMA, mirror)
        assert random_life(driver, seed, num_steps) == expected
        assert_idle(driver)
