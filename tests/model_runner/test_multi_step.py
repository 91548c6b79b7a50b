"""Bursts: a step of decodes that is made several times computes what as many steps would have, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.recording.programs.native_executor import NativeExecutor
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import (
    ForwardMode,
    GetMasks,
    GoOn,
    StepPlan,
    StepResult,
    TokenMasks,
    no_masks,
    to_the_end,
)
from tests.model_runner.conftest import Driver, Request, SeeingExecutor, int32
from tests.scheduler.grammar.toy_matcher import FixedMasks

KINDS = (
    SamplingParams(temperature=0.0, seed=0, max_new_tokens=200),
    SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_new_tokens=200),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.01, seed=5, max_new_tokens=200),
    SamplingParams(temperature=0.0, seed=0, max_new_tokens=200, min_new_tokens=90, logit_bias={7: 3.0}),
    SamplingParams(temperature=0.0, seed=0, max_new_tokens=200, frequency_penalty=0.7, presence_penalty=0.3),
    SamplingParams(temperature=0.8, seed=9, max_new_tokens=200, repetition_penalty=1.3),
)


def burst(driver: Driver, reqs: Sequence[Request], num_rounds: int) -> StepPlan:
    """A plan in which each of them decodes so often."""
    plan = driver.plan([(req, num_rounds) for req in reqs])
    loc = np.frombuffer(plan.out_cache_loc, dtype=np.int32).reshape(len(reqs), num_rounds)
    return replace(
        plan,
        mode=ForwardMode.DECODE,
        num_scheduled_tokens=int32(1 for _ in reqs),
        out_cache_loc=loc.T.tobytes(),
        samples=bytes([1] * len(reqs)),
        total_num_scheduled_tokens=len(reqs),
        num_rounds=num_rounds,
    )


def step(
    driver: Driver,
    reqs: Sequence[Request],
    num_rounds: int,
    go_on: GoOn = to_the_end,
    masks: GetMasks = no_masks,
) -> StepResult:
    """Make such a step, and take its tokens."""
    result: StepResult = driver.runner.launch(burst(driver, reqs, num_rounds), go_on, masks).wait()
    runs = np.frombuffer(result.next_token_ids, dtype=np.int32).reshape(len(reqs), -1)
    counts = np.frombuffer(result.num_next_tokens, dtype=np.int32).tolist() or [1] * len(reqs)
    assert counts == [runs.shape[1]] * len(reqs)
    for req, run in zip(reqs, runs.tolist(), strict=True):
        req.computed += len(run)
        req.tokens += run
    return result


def live(driver: Driver, *, bursts: bool) -> list[list[int]]:
    """Requests join and leave, and decode in bursts of random length, or as often step by step; their outputs."""
    source = random.Random(7)
    running: list[Request] = []
    outputs: list[list[int]] = []
    for turn in range(16):
        if len(running) < 6:
            tokens = [source.randrange(3, 96) for _ in range(source.randint(1, 40))]
            running.append(driver.start(tokens, KINDS[turn % len(KINDS)]))
            driver.step([(running[-1], len(tokens))])
        if len(running) > 3 and source.random() < 0.4:
            driver.finish(running[0])
            outputs.append(running.pop(0).output)
        who = running if source.random() < 0.5 else source.sample(running, source.randint(1, len(running)))
        num_rounds = source.randint(2, 8)
        if bursts:
            step(driver, who, num_rounds)
        else:
            for _ in range(num_rounds):
                driver.step([(req, 1) for req in who])
    return [*outputs, *(req.output for req in running)]


@pytest.fixture(params=["recorded", "not recorded"])
def make_tiny_driver(
    request: pytest.FixtureRequest, make_driver: Callable[..., Driver], make_tiny_llama: Callable[..., Any]
) -> Iterator[Callable[[], Driver]]:
    """The same model behind a driver, as often as wanted."""
    if request.param == "recorded" and (reasons := reasons_against_library()):
        pytest.skip("; ".join(reasons))
    tiny = make_tiny_llama(dtype="bfloat16", hidden_size=64, num_attention_heads=4)

    def make() -> Driver:
        driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
        if request.param == "not recorded":
            driver.run_eagerly()
        drivers.append(driver)
        return driver

    drivers: list[Driver] = []
    yield make
    for driver in drivers:
        executor = driver.runner.executor
        executor = executor.inner if isinstance(executor, SeeingExecutor) else executor
        recorded = isinstance(executor, NativeExecutor) and bool(executor.recorded_sizes)
        assert recorded == (request.param == "recorded")


def test_as_many_steps_would_have_given_the_same(make_tiny_driver):
    in_bursts, one_by_one = make_tiny_driver(), make_tiny_driver()
    logits = [SeeingExecutor(driver).logits for driver in (in_bursts, one_by_one)]

    assert live(in_bursts, bursts=True) == live(one_by_one, bursts=False)

    assert len(logits[0]) == len(logits[1]) > 80
    for ours, theirs in zip(*logits, strict=True):
        assert theirs.isfinite().all() and torch.equal(ours, theirs)


def test_it_ends_where_it_is_told_to(make_tiny_driver):
    driver = make_tiny_driver()
    reqs = [driver.start(tokens, KINDS[0]) for tokens in ([3, 4, 5], [9, 8])]
    driver.step([(req, len(req.tokens)) for req in reqs])
    told: list[list[int]] = []

    def go_on(next_token_ids: bytes) -> bool:
        told.append(np.frombuffer(next_token_ids, dtype=np.int32).tolist())
        return len(told) < 3

    step(driver, reqs, 8, go_on)

    assert [len(req.output) for req in reqs] == [4, 4]
    assert told == [[req.output[n] for req in reqs] for n in (1, 2, 3)]


def test_each_round_has_its_own_masks(make_tiny_driver):
    driver = make_tiny_driver()
    reqs = [driver.start(tokens, KINDS[0]) for tokens in ([3, 4, 5], [9, 8])]
    driver.step([(req, len(req.tokens)) for req in reqs])
    wanted = iter([40, 63, 64, 95])

    class Masks(FixedMasks):
        def before(self) -> TokenMasks:
            bits = np.zeros((1, 96), dtype=np.uint8)
            bits[0, next(wanted)] = 1
            return TokenMasks(np.array([1]), np.packbits(bits, axis=1, bitorder="little").view(np.int32))

    step(driver, reqs, 4, masks=Masks(None))

    assert reqs[1].output[1:] == [40, 63, 64, 95]
    assert next(wanted, None) is None and len(reqs[0].output) == 5


def test_after_one_round_it_is_a_step_like_any_other(make_tiny_driver):
    driver = make_tiny_driver()
    req = driver.start([3, 4, 5], KINDS[0])
    driver.step([(req, 3)])
    result = step(driver, [req], 8, lambda next_token_ids: False)
    assert len(result.next_token_ids) == 4 and not result.num_next_tokens


@pytest.mark.parametrize("round_with_nan", [0, 2])
def test_it_ends_with_the_round_whose_numbers_are_none(make_tiny_driver, round_with_nan):
    driver = make_tiny_driver()
    reqs = [driver.start(tokens, KINDS[0]) for tokens in ([3, 4, 5], [9, 8])]
    driver.step([(req, len(req.tokens)) for req in reqs])
    num_asked = 0

    def spoil() -> None:
        for pool in driver.runner.kv_pool.k:
            pool[driver.slots(reqs[1].pages, 1, 2)] = torch.nan

    def go_on(next_token_ids: bytes) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == round_with_nan:
            spoil()
        return True

    if not round_with_nan:
        spoil()
    result = step(driver, reqs, 6, go_on)

    assert set(result.errors) == {1}
    assert len(reqs[0].output) == 1 + round_with_nan + 1


def test_the_next_request_in_a_row_has_nothing_of_the_one_before(make_tiny_driver):
    driver = make_tiny_driver()
    first = driver.start([3, 4, 5], KINDS[4])
    driver.step([(first, 3)])
    step(driver, [first], 5)
    driver.finish(first)
    driver.rows = [first.row]
    second = driver.start([9, 8], KINDS[4])
    driver.step([(second, 2)])
    step(driver, [second], 5)

    alone = make_tiny_driver()
    (expected,) = alone.generate([[9, 8]], KINDS[4], num=6)
    assert second.output == expected
