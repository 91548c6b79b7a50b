"""Each allocation of a step fails once: the step is dropped or done again, and the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from engine.runtime.step_plan import StepPlan, StepResult
from tests.model_runner.conftest import GREEDY, Driver, Request

from .mirror import Mirror, mirror_device
from .runners import LLAMA, PROMPT, load_driver, on_cpu
from .scenarios import KINDS, assert_idle

PENALIZED = replace(KINDS["penalized"], temperature=0.7, seed=5)
NUM_TOKENS = 3
SMALL = replace(LLAMA, num_layers=1)
STEPS = ("prompt", "mixed", "decode")


def life(driver: Driver, launch: Callable[[str, StepPlan], StepResult]) -> list[list[int]]:
    """The answers of two requests; `launch` makes each of the `STEPS`."""
    first, second = driver.start(PROMPT[:6], PENALIZED), driver.start(PROMPT[3:12], GREEDY)
    works = ([(first, 6)], [(second, 9), (first, 1)], [(first, 1), (second, 1)])
    for name, work in zip(STEPS, works, strict=True):
        result = launch(name, driver.plan(work))
        if result.out_of_memory:
            first, second = restart(driver, first), restart(driver, second)
            break
        tokens = np.frombuffer(result.next_token_ids, dtype=np.int32).tolist()
        for (req, count), token in zip(work, tokens, strict=True):
            req.computed += count
            req.tokens.append(token)
    for req in (first, second):
        while len(req.output) < NUM_TOKENS:
            driver.step([(req, len(req.tokens) - req.computed)])
        driver.finish(req)
    return [first.output, second.output]


def restart(driver: Driver, req: Request) -> Request:
    """Start a request of a dropped step again, as the scheduler does."""
    if req.announced:
        driver.finish(req)
    else:
        driver.rows.append(req.row)
    return driver.start(req.tokens, req.sampling, prompt_len=req.prompt_len)


def fail_at(mirror: Mirror, driver: Driver, step: str, number: int) -> tuple[list[list[int]], bool]:
    """The answers if the n-th allocation of a step fails; False: it has fewer."""
    all_failed: list[int] = []

    def launch(name: str, plan: StepPlan) -> StepResult:
        with mirror.memory.failing_at(number if name == step else None) as failed:
            result: StepResult = driver.runner.launch(plan).wait()
        all_failed.extend(failed)
        return result

    return life(driver, launch), bool(all_failed)


MODES = {"recorded": (True, True), "eager": (False, True), "without Triton": (False, False)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("step", STEPS)
def test_any_allocation_of_a_step_may_fail(mode, step):
    record, triton = MODES[mode]
    with on_cpu():
        cpu = load_driver(SMALL, None)
        expected = life(cpu, lambda _name, plan: cpu.runner.launch(plan).wait())
    with mirror_device(triton=triton) as mirror:
        driver = load_driver(SMALL, mirror, record=record)
        number, failed = 0, True
        while failed:
            found, failed = fail_at(mirror, driver, step, number)
            assert found == expected, f"allocation {number} of the {step} failed"
            mirror.check()
            assert_idle(driver)
            number += 1
        assert number > 3


def test_the_last_allocations_of_a_decode_may_fail():
    with on_cpu():
        cpu = load_driver(SMALL, None)
        expected = life(cpu, lambda _name, plan: cpu.runner.launch(plan).wait())
    with mirror_device(triton=False) as mirror:
        driver = load_driver(SMALL, mirror, record=False)
        for number in (0, 5, 40):
            assert fail_at(mirror, driver, "decode", number) == (expected, True)
