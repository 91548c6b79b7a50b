"""Tests of `BackgroundShare`: how much of a step the background gets, and what stays free for others."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.step_size.background_share import PEAK_S
from tests.scheduler.fake_runner import ints
from tests.scheduler.harness import Harness
from tests.scheduler.step_size.test_step_target import Costs, make_harness, warm_up

BACKGROUND = {"background": True}
COSTS = Costs(step_s=0.02, decode_s=0.0003)


def beside(costs: Costs, batch: ScheduleBatch) -> tuple[float, float, int]:
    """Seconds of a step; of its interactive requests alone; and how many others are in it."""
    total = costs.of(batch.plan)
    lengths = ints(batch.plan.num_scheduled_tokens)
    others = [length for req, length in zip(batch.reqs, lengths, strict=True) if req.background]
    return total, total - sum(costs.decode_s if n == 1 else costs.token_s * n for n in others), len(others)


def step(harness: Harness) -> ScheduleBatch:
    batch = harness.step()
    assert batch is not None
    return batch


def start_lines(harness: Harness, count: int, **options: Any) -> None:
    for idx in range(count):
        harness.submit(f"line{idx}", message=BACKGROUND, **options)
    for _ in range(3):
        harness.step()


@pytest.mark.parametrize("slowdown", [0.05, 0.2])
def test_beside_decodes_a_step_takes_little_longer_and_every_line_goes_on(slowdown):
    harness = make_harness(COSTS, batch_slowdown=slowdown, max_running_requests=40)
    warm_up(harness)
    start_lines(harness, 16, prompt_len=8, max_new_tokens=300)
    for _ in range(4):
        harness.submit(prompt_len=8, max_new_tokens=120)
    by_id = harness.scheduler._parts.requests.by_id
    before = [by_id[f"line{idx}"].output_len for idx in range(16)]

    batches = [step(harness) for _ in range(100)]

    steps = [beside(COSTS, batch) for batch in batches[4:]]
    assert all(total <= alone * (1 + slowdown) * 1.002 for total, alone, _ in steps)
    most = int(slowdown * (COSTS.step_s + 4 * COSTS.decode_s) / COSTS.decode_s)
    assert max(count for _, _, count in steps) in (most - 1, most)
    generated = [by_id[f"line{idx}"].output_len - old for idx, old in enumerate(before)]
    assert min(generated) > 10 and max(generated) - min(generated) <= 3


def test_steps_that_take_the_whole_target_have_no_room():
    harness = make_harness(COSTS, target_step_ms=20.0, max_running_requests=40)
    warm_up(harness)
    start_lines(harness, 4, prompt_len=8, max_new_tokens=300)
    for _ in range(4):
        harness.submit(prompt_len=8, max_new_tokens=50)

    batches = [step(harness) for _ in range(40)]

    assert not any(req.background for batch in batches[2:] for req in batch.reqs)


def test_errors_of_the_prediction_count():
    """Rows of the background cost 10 times what any others cost, which no feature of the prediction shows."""
    harness = make_harness(COSTS, max_running_requests=40)
    warm_up(harness)
    start_lines(harness, 16, prompt_len=8, max_new_tokens=600)
    costs = COSTS

    def step_s(plan):
        extra = 0.0
        rows = harness.scheduler._parts.memory.states.background[ints(plan.rows)]
        if 0 < rows.sum() < len(rows):
            extra = 0.003 * int(rows.sum())
        return costs.of(plan) + extra

    harness.runner.step_s = step_s
    for _ in range(4):
        harness.submit(prompt_len=8, max_new_tokens=400)
    slowdowns = []
    for _ in range(300):
        batch = step(harness)
        _, alone, _ = beside(COSTS, batch)
        slowdowns.append(step_s(batch.plan) / alone)
    assert sum(slowdowns[100:]) / 200 < 1.06


def test_alone_steps_grow_with_the_time_since_the_last_interactive_request():
    costs = Costs(step_s=0.009, decode_s=0.0004, token_s=0.001)
    harness = make_harness(costs, max_running_requests=4)
    warm_up(harness)
    harness.submit(prompt_len=8, max_new_tokens=2)
    harness.run_until_idle()
    for idx in range(3):
        harness.submit(f"line{idx}", message=BACKGROUND, prompt_len=1500, max_new_tokens=1)

    for quiet_s, low_s, high_s in ((0.0, 0.04, 0.06), (20.0, 0.15, 0.25), (600.0, 0.3, 0.42)):
        harness.now_s += quiet_s
        batch = step(harness)
        assert low_s <= costs.of(batch.plan) <= high_s, quiet_s


def test_rows_of_the_busiest_minute_stay_free():
    harness = make_harness(COSTS, max_running_requests=8)
    for _ in range(5):
        harness.submit(prompt_len=8, max_new_tokens=4)
    harness.run_until_idle()
    start_lines(harness, 8, prompt_len=8, max_new_tokens=300)
    for _ in range(20):
        harness.step()
    running = harness.scheduler._parts.requests.with_row
    assert len(running) == 3

    harness.now_s += PEAK_S
    for _ in range(20):
        harness.step()
    assert len(harness.scheduler._parts.requests.with_row) == 8


def test_steps_with_interactive_prompts_have_no_background():
    harness = make_harness(COSTS, max_running_requests=40)
    warm_up(harness)
    start_lines(harness, 4, prompt_len=8, max_new_tokens=300)
    harness.submit(prompt_len=8, max_new_tokens=60)
    for _ in range(4):
        harness.step()
    harness.submit(prompt_len=200, max_new_tokens=2)

    batches = [step(harness) for _ in range(10)]

    with_prompts = [batch for batch in batches if batch.num_extends and not batch.reqs[0].background]
    assert with_prompts and not any(req.background for batch in with_prompts for req in batch.reqs)
    assert any(req.background for batch in batches for req in batch.reqs)


def test_alone_a_step_is_at_least_twice_as_long_as_one_without_work():
    """A target below the fixed 20 ms would leave a row for each reading of the weights."""
    harness = make_harness(Costs(step_s=0.02, decode_s=0.001), target_step_ms=10.0, max_running_requests=40)
    warm_up(harness)
    start_lines(harness, 30, prompt_len=8, max_new_tokens=300)
    for _ in range(30):
        harness.step()
    harness.submit(prompt_len=8, max_new_tokens=2)
    for _ in range(3):
        harness.step()

    assert 15 <= len(step(harness)) <= 21
