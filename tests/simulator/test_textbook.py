"""The exercise of the text books: eight prompts, 100 output tokens each, static and continuous batching, by hand.

Prompts: 10 + 50 + 20 + 100 + 30 + 15 + 80 + 25 = 330 tokens, the longest 100.
"""

from __future__ import annotations

import math

import pytest

from engine.simulator.cluster import simulate
from engine.simulator.generated_workloads import Arrival, given_lengths
from engine.simulator.report import Report
from tests.simulator.linear_cost import LinearCost

PROMPTS = [10, 50, 20, 100, 30, 15, 80, 25]
AT_ONCE = Arrival(num_requests=8, rate=math.inf)
TOKEN_COST = LinearCost(prefill_token_s=1.0, decode_row_s=1.0)
"""One second per token that is computed, padding or not: the time of a run is the number of its tokens."""
STEP_COST = LinearCost(step_s=1.0)
"""One second per step, whatever is in it: the time of a run is the number of its steps."""


def run(make_replica, cost, outputs=(100,), **settings) -> Report:
    return simulate(given_lengths(PROMPTS, outputs, AT_ONCE), make_replica(**settings), cost)


def test_one_static_batch_of_eight_pads_prompts_to_the_longest(make_replica):
    report = run(make_replica, TOKEN_COST, schedule_policy="static", static_batch_size=8)

    # Prefill: 8 rows of 100 tokens = 800, of which 800 - 330 = 470 are padding. Decode: 99 steps of 8 rows = 792; all
    # end together, so nothing is padded there.
    assert report.num_steps == 100
    assert report.duration_s == 800 + 792
    assert report.padding_share == pytest.approx(470 / 1592)
    prefill_padding = 1 - sum(PROMPTS) / (8 * max(PROMPTS))
    assert prefill_padding == pytest.approx(0.5875)
    assert report.padding_share * 1592 / 800 == pytest.approx(prefill_padding)


def test_continuous_batching_computes_what_there_is(make_replica):
    report = run(make_replica, TOKEN_COST)

    assert report.num_steps == 100  # the prompts, with the first token of each, and 99 decodes
    assert report.duration_s == 330 + 99 * 8  # 1,122
    assert report.padding_share == 0.0


def test_throughput_ratio_with_equal_outputs(make_replica):
    static = run(make_replica, TOKEN_COST, schedule_policy="static", static_batch_size=8)
    continuous = run(make_replica, TOKEN_COST)

    assert continuous.output_tok_s / static.output_tok_s == pytest.approx(1592 / 1122)  # 1.42
    assert continuous.output_tokens == static.output_tokens == 800


def test_two_static_batches_of_four_take_twice_the_steps(make_replica):
    static = run(make_replica, STEP_COST, schedule_policy="static", static_batch_size=4)
    continuous = run(make_replica, STEP_COST)

    # 10 50 20 100 | 30 15 80 25: each batch takes 1 + 99 steps, and the second waits for the first.
    assert (static.num_steps, continuous.num_steps) == (200, 100)
    assert continuous.output_tok_s / static.output_tok_s == pytest.approx(2.0)
    # Prompts: 4 · 100 + 4 · 80 = 720 tokens for 330; decodes are full: 2 · 99 · 4 = 792.
    assert static.padding_share == pytest.approx((720 - 330) / (720 + 792))


def test_static_batches_wait_for_the_slowest(make_replica):
    """Outputs of 100 and 10 tokens in turn, batches of 4: half of the rows are idle for 90 of 99 decodes."""
    outputs = [100, 10]
    static = run(make_replica, STEP_COST, outputs, schedule_policy="static", static_batch_size=4)
    continuous = run(make_replica, STEP_COST, outputs, max_running=4)

    assert static.num_steps == 200
    # Each batch: 99 decodes of 4 rows = 396, needed are 2 · 99 + 2 · 9 = 216. Prompts as above: 720 for 330.
    assert static.padding_share == pytest.approx((2 * (396 - 216) + 390) / (2 * 396 + 720))
    # With 4 rows: r0 (100) and r1 (10) r2 (100) r3 (10) start; r4 (100) and r5 (10) take the rows of r1 and r3 when
    # these have made 10 tokens; r6 (100) takes r5's row after 10 more, r7 (10) one of those that are free at 100.
    # So r6 is last: 10 + 10 + 100 steps.
    assert continuous.num_steps == 120
    assert continuous.output_tok_s / static.output_tok_s == pytest.approx(200 / 120)


def test_one_at_a_time_takes_the_sum_of_the_outputs(make_replica):
    report = run(make_replica, STEP_COST, schedule_policy="fifo-serial")

    assert report.num_steps == 8 * 100
    assert report.duration_s == 800
    assert report.queue_ms.p50 == pytest.approx(350_000)  # 0, 100, ... 700 s
