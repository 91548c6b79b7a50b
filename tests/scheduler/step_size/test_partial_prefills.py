"""Tests of `scheduler/step_size/step_limits.py`: vLLM V0's rules, and what they are for."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runtime.config.engine_config import SchedulerConfig
from engine.scheduler.admission.prefill_adder import PrefillAdder
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict
from engine.scheduler.requests.req import Chunk, Req
from engine.scheduler.step_size.step_limits import PartialLimits, PartialPrefills, reserved_tokens
from tests.scheduler.admission.prefill_pass import (
    Candidate,
    make_adder,
    make_budget,
    make_req,
    prefix_of,
    run_pass,
)

UNTIL_IDLE = 1000


def add(adder: PrefillAdder, rid: str, prompt_len: int, max_new_tokens: int = 1) -> Verdict:
    req = make_req(rid, prompt_len, max_new_tokens)
    return adder.add(req, prefix_of(adder, req))


def run_steps(
    arrivals: list[tuple[int, Req]], limits: PartialLimits, *, chunk_size: int = 2048
) -> list[list[Chunk]]:
    """Steps without decodes until every prompt is computed; `arrivals` has (step, request) in order."""
    waiting: list[Req] = []
    computed: dict[Req, int] = {}  # of those in the middle of their chunks
    steps: list[list[Chunk]] = []
    while len(steps) < UNTIL_IDLE:
        waiting += [req for step, req in arrivals if step == len(steps)]
        budget = make_budget(
            page_size=16,
            available_tokens=1 << 20,
            expected_tokens=sum(req.fill_len - done for req, done in computed.items()),
            max_prefill_tokens=16384,
            chunk_size=chunk_size,
        )
        adder = make_adder(
            budget, limits=limits, num_prompts=len(computed) + len(waiting), nothing_runs=not computed
        )
        run_pass(adder, list(computed.items()), [Candidate(req) for req in waiting])
        for chunk in adder.chunks:
            assert computed.pop(chunk.req, chunk.start) == chunk.start
            if not chunk.is_last:
                computed[chunk.req] = chunk.start + chunk.length
            if chunk.is_first:
                waiting.remove(chunk.req)
        assert len(computed) <= limits.max_partial
        steps.append(adder.chunks)
        if not (waiting or computed) and len(steps) > max(step for step, _ in arrivals):
            return steps
    raise AssertionError("it never ends")


def steps_to_first_token(arrivals: list[tuple[int, Req]], steps: list[list[Chunk]]) -> dict[str, int]:
    """Steps from each request's arrival to the one in which its prompt ends, that one included."""
    arrived = {req.rid: step for step, req in arrivals}
    ended = {chunk.req.rid: step for step, chunks in enumerate(steps) for chunk in chunks if chunk.is_last}
    return {rid: ended[rid] - arrived[rid] + 1 for rid in arrived}


def one_long_and_short_ones() -> list[tuple[int, Req]]:
    """A prompt of 32k tokens, and a short one with each of the ten steps after it."""
    return [(0, make_req("long", 32_768))] + [(step, make_req(f"short-{step}", 192)) for step in range(1, 11)]


@pytest.mark.parametrize(
    ("max_partial", "short", "long"),
    [(1, [16, 15, 14, 13, 12, 11, 10, 9, 8, 7], 16), (2, [1] * 10, 17), (4, [1] * 10, 17)],
)
def test_a_long_prompt_does_not_hold_up_short_ones_behind_it(max_partial, short, long):
    """Steps of 2,048 tokens: 16 for the long prompt alone. The short ones go along at once, and cost it one more."""
    arrivals = one_long_and_short_ones()

    steps = run_steps(arrivals, PartialLimits(max_partial, 1, 1300))

    ttft = steps_to_first_token(arrivals, steps)
    assert [ttft[f"short-{step}"] for step in range(1, 11)] == short
    assert ttft["long"] == long


def test_what_short_ones_leave_of_their_shares_goes_to_the_long_one():
    arrivals = one_long_and_short_ones()

    steps = run_steps(arrivals, PartialLimits(4, 1, 1300))

    sizes = [sum(chunk.length for chunk in chunks) for chunks in steps]
    assert sizes == [2048] * 16 + [10 * 192]
    long = [chunk.length for chunks in steps for chunk in chunks if chunk.req.rid == "long"]
    assert long == [2048] + [2048 - 192] * 10 + [2048] * 5 + [1920]


def test_long_prompts_share_one_place_and_short_ones_pass_them():
    arrivals = [(0, make_req("long-0", 8000)), (0, make_req("long-1", 8000)), (0, make_req("short", 300))]

    steps = run_steps(arrivals, PartialLimits(3, 1, 1000))

    assert steps_to_first_token(arrivals, steps) == {"long-0": 5, "long-1": 8, "short": 1}
    both = run_steps(arrivals, PartialLimits(3, 2, 1000))
    assert steps_to_first_token(arrivals, both) == {"long-0": 8, "long-1": 8, "short": 1}


def test_a_long_prompt_that_is_nearly_done_is_long_no_more():
    limits = PartialLimits(2, 1, 100)
    adder = make_adder(make_budget(chunk_size=32), limits=limits, num_prompts=2)

    adder.continue_chunk(make_req("nearly", 400), 320)
    verdict = add(adder, "next", 400)

    assert (verdict.result, verdict.reason) == (AddReqResult.CONTINUE, Reason.CHUNKED)


def test_a_long_prompt_too_many_is_passed_over():
    limits = PartialLimits(4, 1, 100)
    adder = make_adder(make_budget(chunk_size=32), limits=limits, num_prompts=3)

    adder.continue_chunk(make_req("first", 400), 32)
    long, short = add(adder, "long", 101), add(adder, "short", 8)

    assert (long.result, long.reason) == (AddReqResult.SKIP, Reason.LONG_PARTIAL_LIMIT)
    assert (long.need, long.have) == (101, 8)
    assert short.result is AddReqResult.CONTINUE


def test_a_prompt_takes_no_more_than_its_share_and_as_many_are_cut_as_may():
    adder = make_adder(make_budget(chunk_size=64), limits=PartialLimits(2, 2, 0), num_prompts=4)

    verdicts = [add(adder, f"{idx}", length) for idx, length in enumerate((4, 40, 20, 9, 20))]

    assert adder._partial.share == 32
    assert [(verdict.reason, verdict.extend_len) for verdict in verdicts] == [
        (Reason.ADMITTED, 4),
        (Reason.CHUNKED, 32),
        (Reason.ADMITTED, 20),
        (Reason.CHUNKED, 8),
        (Reason.PARTIAL_LIMIT, 20),
    ]


def test_a_prompt_that_may_not_be_cut_ends_the_pass():
    adder = make_adder(make_budget(chunk_size=64), limits=PartialLimits(2, 2, 0), num_prompts=2)

    for rid, computed in (("a", 4), ("b", 8)):
        adder.continue_chunk(make_req(rid, 26 + computed + 200 * (rid == "b")), computed)
    verdict = add(adder, "c", 40)

    # "a" ends and is partial no more, "b" goes on: one place is left, and six tokens of the step, a page of them
    assert [chunk.length for chunk in adder.chunks] == [26, 32, 4] and verdict.reason is Reason.CHUNKED
    refused = add(adder, "d", 40)
    assert (refused.result, refused.reason) == (AddReqResult.OTHER, Reason.PARTIAL_LIMIT)


def test_the_leftover_goes_first_to_the_one_that_lacks_least():
    adder = make_adder(
        make_budget(chunk_size=64, max_prefill_tokens=64), limits=PartialLimits(4, 4, 0), num_prompts=4
    )
    for rid, length in (("long", 500), ("short", 20)):
        add(adder, rid, length, 9)
    assert [chunk.length for chunk in adder.chunks] == [16, 16]

    changed = adder.use_leftover()

    assert [(chunk.length, chunk.is_last) for chunk in adder.chunks] == [(44, False), (20, True)]
    assert [(verdict.rid, verdict.reason, verdict.extend_len) for verdict in changed] == [
        ("short", Reason.ADMITTED, 20),
        ("long", Reason.CHUNKED, 44),
    ]
    assert adder.budget.rem_step_tokens == 0
    # in memory as if they had been admitted so: the rest and the output were reserved before
    assert adder.budget.cur_rem_tokens == 4000 - (44 + 4) - (20 + 4)
    assert adder.budget.rem_total_tokens == 4000 - (500 + 4 + 9) - (20 + 4 + 9)


def test_with_one_partial_prefill_everything_is_as_without():
    arrivals = [(0, make_req("a", 5000)), (0, make_req("b", 3000)), (1, make_req("c", 10))]

    steps = run_steps(arrivals, PartialLimits(1, 1, 100))  # the threshold means nothing then

    assert [[(chunk.req.rid, chunk.length) for chunk in chunks] for chunks in steps] == [
        [("a", 2048)],
        [("a", 2048)],
        [("a", 904), ("b", 1136)],  # 2,048 - 904, in whole pages
        [("b", 1864), ("c", 10)],
    ]


@pytest.mark.parametrize(
    ("num_prompts", "max_partial", "step_tokens", "share"),
    [(0, 4, 100, 100), (1, 4, 100, 100), (2, 4, 100, 48), (9, 4, 100, 16), (9, 1, 100, 100), (9, 4, 10, 16)],
)
def test_a_share_is_whole_pages_of_the_step_and_at_least_one(num_prompts, max_partial, step_tokens, share):
    partial_prefills = PartialPrefills(
        PartialLimits(max_partial), page_size=16, step_tokens=step_tokens, num_prompts=num_prompts
    )

    assert partial_prefills.share == share


def test_limits_come_from_the_configuration():
    config = SchedulerConfig(
        max_num_partial_prefills=4, max_long_partial_prefills=2, long_prefill_token_threshold=500
    )

    limits = PartialLimits.of(config)

    assert limits == (4, 2, 500)
    assert not limits.is_long(500) and limits.is_long(501)
    assert not PartialLimits(1, 1, 500).is_long(501)
    assert not PartialLimits(4, 1, 0).is_long(10_000)


def test_the_rests_of_prompts_are_promised_in_whole_pages_of_each():
    assert reserved_tokens(np.array([1, 16, 17], dtype=np.int32), 16) == 16 + 16 + 32
    assert reserved_tokens(np.array([], dtype=np.int32), 16) == 0
