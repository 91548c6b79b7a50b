from __future__ import annotations

import pytest

from engine.runtime.errors import QueueFullError, RequestError
from engine.runtime.scheduler_report import SchedulerReport
from engine.tokenizer_manager.overload.queue_limiter import QueueLimiter


def check(limiter: QueueLimiter, num_new: int, num_live: int, now_s: float) -> None:
    """Raise why there is no room."""
    if (refusal := limiter.reason_against(num_new, num_live, now_s)) is not None:
        raise refusal


def test_the_limiter_takes_what_runs_and_what_may_wait():
    limiter = QueueLimiter(max_queued_requests=2, max_running_requests=3)
    for num_live in range(5):
        check(limiter, 1, num_live, 0.0)
        limiter.sent(0.0)

    with pytest.raises(
        QueueFullError, match="5 requests wait, the limit is 2 and 3 that may start at once; retry"
    ):
        check(limiter, 1, 5, 0.0)


def test_the_limiter_counts_free_rows_only_when_nobody_waits_for_memory():
    limiter = QueueLimiter(max_queued_requests=2, max_running_requests=8)
    limiter.reported(SchedulerReport(sent_s=1.0, num_running_reqs=1, num_queue_reqs=2))  # memory is full

    with pytest.raises(QueueFullError):
        check(limiter, 1, 3, 1.0)


def test_the_limiter_forgets_what_the_report_has_seen():
    limiter = QueueLimiter(max_queued_requests=1, max_running_requests=1)
    limiter.sent(1.0)
    limiter.sent(1.0)
    limiter.reported(SchedulerReport(sent_s=2.0, num_running_reqs=1, num_queue_reqs=0))

    check(limiter, 1, 1, 2.0)  # one runs, one has finished


def test_requests_one_after_another_are_never_refused_between_two_reports():
    limiter = QueueLimiter(max_queued_requests=1, max_running_requests=1)
    for _ in range(50):
        check(limiter, 1, 0, 1.0)
        limiter.sent(1.0)
        limiter.finished(1.0)


def test_more_at_once_than_the_limiter_could_ever_take_is_not_told_to_retry():
    limiter = QueueLimiter(max_queued_requests=2, max_running_requests=3)

    limiter.check_possible(5)
    with pytest.raises(RequestError, match="6 answers") as caught:
        limiter.check_possible(6)

    assert caught.value.status == 400


def test_retry_after_follows_the_rate_at_which_requests_finish():
    limiter = QueueLimiter(max_queued_requests=1, max_running_requests=1)
    for second in range(11):
        limiter.finished(float(second))  # one per second
    limiter.reported(SchedulerReport(sent_s=10.0, num_running_reqs=1, num_queue_reqs=8))

    with pytest.raises(QueueFullError) as caught:
        check(limiter, 1, 9, 10.0)

    assert 7 <= caught.value.retry_after_s <= 8


def test_what_is_being_tokenized_counts_as_waiting():
    limiter = QueueLimiter(max_queued_requests=2, max_running_requests=3)
    with limiter.reserve(5), pytest.raises(QueueFullError, match="5 requests wait"):
        check(limiter, 1, 0, 0.0)
    check(limiter, 5, 0, 0.0)


def test_tokens_of_prompts_are_bounded_and_leave_with_the_first_token():
    limiter = QueueLimiter(10, 10, max_queued_tokens=100)
    limiter.sent(0.0, 60)
    assert limiter.reason_against_tokens(40, 0.0) is None
    refusal = limiter.reason_against_tokens(41, 0.0)
    assert refusal is not None
    assert "60 tokens of prompts wait, the limit is 100, and this request has 41" in refusal.message
    assert (refusal.status, refusal.position) == (429, 1)
    limiter.started(60)
    assert limiter.reason_against_tokens(41, 0.0) is None
    assert limiter.num_unstarted == 0


def test_a_prompt_larger_than_the_bound_comes_in_where_none_waits():
    limiter = QueueLimiter(10, 10, max_queued_tokens=100)
    assert limiter.reason_against_tokens(1000, 0.0) is None
    limiter.sent(0.0, 1000)
    assert limiter.reason_against_tokens(1, 0.0) is not None


def test_what_is_taken_back_makes_room_before_the_next_report():
    limiter = QueueLimiter(max_queued_requests=2, max_running_requests=1)
    limiter.reported(SchedulerReport(sent_s=1.0, num_running_reqs=1, num_queue_reqs=2))
    assert limiter.reason_against(1, 3, 1.0) is not None
    limiter.withdrawn(1, 2.0)
    assert limiter.reason_against(1, 3, 2.0) is None
    limiter.reported(SchedulerReport(sent_s=3.0, num_running_reqs=1, num_queue_reqs=2))
    assert limiter.reason_against(1, 3, 3.0) is not None


def test_flex_requests_take_no_place_from_others_and_have_a_limit_of_their_own():
    limiter = QueueLimiter(max_queued_requests=1, max_running_requests=2)
    for _ in range(8):
        assert limiter.reason_against_background(1, 0.0) is None
        limiter.sent(0.0, 50, background=True)
    limiter.reported(
        SchedulerReport(
            sent_s=1.0,
            num_running_reqs=2,
            num_background_running_reqs=2,
            num_queue_reqs=6,
            num_background_queue_reqs=6,
        )
    )

    refusal = limiter.reason_against_background(1, 1.0)
    assert refusal is not None and "8 flex requests run or wait, the limit is 8" in str(refusal)
    check(limiter, 3, 8, 1.0)  # two rows and a place
    with pytest.raises(QueueFullError):
        check(limiter, 4, 8, 1.0)
    with pytest.raises(RequestError, match="at most 8 flex"):
        limiter.reason_against_background(9, 1.0)
