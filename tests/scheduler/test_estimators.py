"""Tests of `scheduler/estimator.py`: what all rules promise, then each of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.config.engine_config import SchedulerConfig
from engine.scheduler.arrays import IntArray
from engine.scheduler.estimator import (
    CLIP_MAX_NEW_TOKENS,
    GROW_AT,
    WINDOW,
    BetaReservation,
    FullReservation,
    NewTokenRatio,
    OutputEstimator,
    make_estimator,
)
from tests.scheduler.admission.prefill_pass import make_req
from tests.selection import examples

PAGE_SIZE = 4
NAMES = ("ratio", "beta", "full", "none")


def make(name: str, conservativeness: float = 1.0) -> OutputEstimator:
    config = SchedulerConfig(admission_estimator=name, schedule_conservativeness=conservativeness)  # type: ignore[arg-type]
    return make_estimator(config, PAGE_SIZE)


class Row:
    """A running request, as the scheduler's arrays have it."""

    def __init__(self, max_new: int, generated: int, ignore_eos: bool = False) -> None:
        self.max_new = max_new
        self.generated = min(generated, max_new - 1)
        self.ignore_eos = ignore_eos
        self.to_come = max_new - max(
            self.generated, 1
        )  # the token just sampled has no slot yet, the last gets none

    def __repr__(self) -> str:
        return f"Row({self.max_new}, {self.generated}, {self.ignore_eos})"


def expected(estimator: OutputEstimator, *rows: Row) -> float:
    return estimator.expected(
        ints([row.to_come for row in rows]),
        ints([row.generated for row in rows]),
        ints([row.max_new for row in rows]),
        np.array([row.ignore_eos for row in rows], dtype=np.bool_),
    )


def ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int32)


def whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE


rows = st.builds(Row, st.integers(1, 20_000), st.integers(0, 20_000), st.booleans())
events = st.lists(
    st.one_of(
        st.tuples(st.just("finished"), st.integers(1, 50), st.integers(50, 100)),
        st.tuples(st.just("after_retraction"), st.integers(1, 8), st.integers(0, 999), st.integers(1, 9999)),
        st.tuples(st.just("after_decode")),
        st.tuples(st.just("reset")),
    ),
    max_size=30,
)


def experienced(name: str, conservativeness: float, history: list[tuple[object, ...]]) -> OutputEstimator:
    estimator = make(name, conservativeness)
    for event, *arguments in history:
        getattr(estimator, str(event))(*arguments)
    return estimator


# ------------------------------------------------------------ promises of all


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(100))
@given(
    some=st.lists(rows, max_size=6),
    one_more=rows,
    conservativeness=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
    history=events,
)
def test_never_negative_and_never_more_than_can_come(name, some, one_more, conservativeness, history):
    estimator = experienced(name, conservativeness, history)
    limit = whole_pages if name == "full" else int

    alone = expected(estimator, one_more)
    before, after = expected(estimator, *some), expected(estimator, *some, one_more)

    assert 0 <= alone <= limit(one_more.to_come)
    assert after == pytest.approx(before + alone)  # hence one more request never makes it less
    assert alone <= expected(FullReservation(PAGE_SIZE), one_more)
    assert 0.0 <= estimator.current <= 1.0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(100))
@given(
    row=rows, progress=st.integers(0, 500), conservativeness=st.sampled_from([0.01, 1.0, 3.0]), history=events
)
def test_of_a_request_that_goes_on_no_less_is_expected_in_all(name, row, progress, conservativeness, history):
    """What it has and what is expected beyond never shrinks while it generates; full rounds to a page, though."""
    estimator = experienced(name, conservativeness, history)
    later = Row(row.max_new, row.generated + progress, row.ignore_eos)
    rounding = PAGE_SIZE if name == "full" else 0

    before = row.max_new - row.to_come + expected(estimator, row)
    after = later.max_new - later.to_come + expected(estimator, later)

    assert after >= before - rounding - 1e-6


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(100))
@given(
    max_new=st.integers(1, 20_000),
    output_len=st.integers(0, 20_000),
    ignore_eos=st.booleans(),
    conservativeness=st.sampled_from([0.01, 1.0, 3.0]),
    history=events,
)
def test_a_candidate_gets_no_more_than_can_come(
    name, max_new, output_len, ignore_eos, conservativeness, history
):
    estimator = experienced(name, conservativeness, history)
    req = make_req("r", 5, max_new, ignore_eos=ignore_eos)
    req.output_len = min(output_len, max_new - 1)
    remaining = max_new - req.output_len

    kept = estimator.expected_of(req)

    least = {"ratio": 1, "beta": 1, "full": remaining, "none": 0}[name]
    assert least <= kept <= remaining
    row = Row(max_new, req.output_len, ignore_eos)
    if name != "full":  # which rounds later to whole pages
        assert expected(estimator, row) <= kept, (
            "once admitted it is expected to take more than was kept for it"
        )


@pytest.mark.parametrize("name", NAMES)
def test_nobody_running_is_expected_to_add_nothing(name):
    assert expected(make(name)) == 0


# ------------------------------------------------------------ ratio: the constants are SGLang's


def test_the_ratio_falls_from_its_start_to_a_share_of_it_in_600_steps():
    ratio = NewTokenRatio(1.0)
    assert ratio.current == pytest.approx(0.7)

    ratio.after_decode()
    assert ratio.current == pytest.approx(0.7 - (0.7 - 0.098) / 600)

    for _ in range(1000):
        ratio.after_decode()
    assert ratio.current == pytest.approx(0.098)


def test_conservativeness_scales_the_ratio_up_to_everything():
    assert NewTokenRatio(0.5).current == pytest.approx(0.35)
    assert NewTokenRatio(3.0).current == 1.0


def test_a_retraction_raises_the_ratio_to_what_the_remaining_have_generated():
    ratio = NewTokenRatio(0.1)

    ratio.after_retraction(num_remaining=4, generated_tokens=120, max_new_tokens=999)
    assert ratio.current == pytest.approx((120 + 80) / 1000)

    ratio.after_retraction(num_remaining=4, generated_tokens=990, max_new_tokens=1000)
    assert ratio.current == 1.0

    ratio.reset()
    assert ratio.current == pytest.approx(0.07)


def test_a_retraction_never_lowers_the_ratio():
    """Ten young requests with high limits: the estimate would be below the minimum."""
    ratio = NewTokenRatio(1.0)
    ratio.after_decode()
    before = ratio.current

    ratio.after_retraction(num_remaining=10, generated_tokens=50, max_new_tokens=10 * 4000)

    assert ratio.current == before


def test_the_ratio_counts_so_much_of_a_request_and_all_of_those_without_an_end_of_their_own():
    ratio = NewTokenRatio(1.0)

    assert expected(ratio, Row(101, 1)) == pytest.approx(70)
    assert expected(ratio, Row(101, 1, ignore_eos=True)) == 100
    assert expected(ratio, Row(9001, 1), Row(9001, 1, ignore_eos=True)) == pytest.approx(
        1.7 * CLIP_MAX_NEW_TOKENS
    )
    assert ratio.expected_of(make_req("r", 5, 100)) == 100
    assert ratio.expected_of(make_req("r", 5, 9000)) == CLIP_MAX_NEW_TOKENS


# ------------------------------------------------------------ beta


def test_beta_starts_at_a_half_and_is_the_mean_of_the_last_hundred():
    beta = BetaReservation(1.0)
    assert beta.current == 0.5

    for _ in range(WINDOW // 2):
        beta.finished(10, 100)
    assert beta.current == pytest.approx((0.5 + 0.1) / 2)

    shares = [k / 300 for k in range(1, 301)]
    for k in range(1, 301):
        beta.finished(k, 300)
    assert beta.current == pytest.approx(sum(shares[-WINDOW:]) / WINDOW)


@pytest.mark.slow
@given(shares=st.lists(st.integers(0, 1000), min_size=WINDOW, max_size=3 * WINDOW))
def test_beta_converges_to_the_mean_whatever_came_before(shares):
    beta = BetaReservation(1.0)
    for share in shares:
        beta.finished(share, 1000)

    assert beta.current == pytest.approx(sum(shares[-WINDOW:]) / WINDOW / 1000)


@pytest.mark.parametrize(
    ("generated", "reserved"),
    [(0, 100), (79, 100), (80, 150), (119, 150), (120, 225), (179, 225), (180, 338), (270, 400), (399, 400)],
)
def test_a_reservation_grows_by_half_when_four_fifths_of_it_are_used(generated, reserved):
    """Of at most 400 tokens a quarter is expected: 100, 150, 225, 337.5, all of them."""
    beta = BetaReservation(1.0)
    for _ in range(WINDOW):
        beta.finished(25, 100)
    req = make_req("r", 5, 400)
    req.output_len = generated

    with_kv = max(generated, 1)  # the newest token has none yet
    assert expected(beta, Row(400, generated)) == min(reserved, 400) - with_kv
    assert beta.expected_of(req) == reserved - generated


@given(max_new=st.integers(1, 100_000), generated=st.integers(0, 100_000), output=st.integers(0, 100))
def test_a_request_has_never_used_four_fifths_of_a_reservation_that_could_grow(max_new, generated, output):
    beta = BetaReservation(1.0)
    for _ in range(WINDOW):
        beta.finished(output, 100)
    req = make_req("r", 5, max_new)
    req.output_len = min(generated, max_new - 1)

    reserved = req.output_len + beta.expected_of(req)

    assert reserved == max_new or req.output_len < GROW_AT * reserved


def test_after_a_retraction_beta_is_higher_and_forgets_it_as_requests_finish():
    beta = BetaReservation(0.2)
    assert beta.current == pytest.approx(0.1)

    beta.after_retraction(num_remaining=2, generated_tokens=359, max_new_tokens=999 // 2 + 500)
    assert beta.current == pytest.approx((359 + 40) / 1000, rel=0.01)

    raised = beta.current
    for _ in range(10):
        beta.finished(50, 100)
    assert 0.1 < beta.current < raised
    for _ in range(3 * WINDOW):
        beta.finished(50, 100)
    assert beta.current == pytest.approx(0.1)

    beta.after_retraction(num_remaining=2, generated_tokens=359, max_new_tokens=999)
    beta.reset()
    assert beta.current == pytest.approx(0.1)


# ------------------------------------------------------------ full, none


def test_full_keeps_every_page_that_can_come():
    full = make("full")

    assert expected(full, Row(10, 1), Row(9, 1), Row(10_000, 1)) == 12 + 8 + 10_000
    assert full.expected_of(make_req("r", 5, 10_000)) == 10_000
    assert full.current == 1.0


@given(computed=st.integers(1, 500), to_come=st.integers(0, 500), page_size=st.sampled_from([1, 4, 16, 64]))
def test_full_is_an_upper_bound_of_pages_wherever_a_request_stands(computed, to_come, page_size):
    full = FullReservation(page_size)
    kept = full.expected(ints([to_come]), ints([0]), ints([to_come + 1]), np.array([False]))

    held, needed = -(-computed // page_size), -(-(computed + to_come) // page_size)
    assert (needed - held) * page_size <= kept < to_come + page_size


def test_none_keeps_nothing():
    none = make("none")

    assert expected(none, Row(100, 1), Row(100, 1, ignore_eos=True)) == 0
    assert none.expected_of(make_req("r", 5, 100)) == 0
    assert none.current == 0.0
