"""Records -> what each request did, pass by pass."""

from __future__ import annotations

import itertools
import time

import pytest

from engine.cli.trace.story import MarkKind, Span, SpanKind, coarsen
from engine.cli.trace.timeline import EmptyLogError, TimelineBuilder, read_timeline
from engine.runtime.messages import FinishKind
from engine.runtime.step_plan import ForwardMode
from engine.scheduler.records.decision_log import (
    Arrived,
    BudgetState,
    Finished,
    PageCounts,
    PassRecord,
    Retraction,
    Settled,
)
from engine.scheduler.records.verdict import AddReqResult, CacheMiss, MissKind, Reason, Verdict


class Log:
    """Builds records: one pass every 10 ms, each settled 8 ms later unless it is said otherwise."""

    def __init__(self):
        self.records = []
        self.num_passes = 0

    @property
    def now_s(self):
        return 100 + self.num_passes * 0.01

    def arrive(self, rid, prompt_len=8):
        self.records.append(Arrived(self.now_s - 0.001, rid, prompt_len, 16, tenant="acme"))

    def a_pass(self, *verdicts, left=(), settle=True, **fields):
        self.num_passes += 1
        record = PassRecord(
            100 + self.num_passes * 0.01, self.num_passes, ForwardMode.MIXED, verdicts=list(verdicts)
        )
        for name, value in fields.items():
            setattr(record, name, value)
        self.records.append(record)
        if settle:
            self.settle(self.num_passes, *left)

    def settle(self, step_id, *left):
        self.records.append(Settled(100 + step_id * 0.01 + 0.008, step_id, 0.007, left=list(left)))

    def timeline(self):
        return read_timeline(self.records)

    def story(self, rid):
        (story,) = [each for each in self.timeline().requests if each.rid == rid]
        return story

    def spans(self, rid):
        return [(span.kind.name, span.first, span.last) for span in self.story(rid).spans]


def admitted(rid, extend_len=8, reason=Reason.ADMITTED, need=20, have=100, prefix_len=0):
    return Verdict(rid, AddReqResult.CONTINUE, reason, prefix_len, extend_len, 4, need, have)


def refused(rid, reason=Reason.NO_KV, have=10):
    return Verdict(rid, AddReqResult.NO_TOKEN, reason, 0, 8, 4, 20, have)


def continued(rid, extend_len, remaining):
    return Verdict(
        rid, AddReqResult.CONTINUE, Reason.CHUNK_CONTINUED, 8, extend_len, 0, remaining, extend_len
    )


@pytest.fixture
def log():
    return Log()


def test_a_request_waits_computes_and_decodes_until_it_is_answered(log):
    log.arrive("a", prompt_len=8)
    log.a_pass(refused("a", have=10), num_waiting=1)
    log.a_pass(refused("a", have=14), num_waiting=1)
    log.a_pass(admitted("a"), num_waiting=1, cache_misses=[CacheMiss("a", 8, 4, MissKind.DIFFERS, 5)])
    log.a_pass(num_decodes=1)
    log.a_pass(num_decodes=1, left=[Finished("a", FinishKind.STOP, 3, "")])
    log.a_pass()

    story = log.story("a")

    assert [(span.kind.name, span.first, span.last) for span in story.spans] == [
        ("WAIT", 0, 1),
        ("PREFILL", 2, 2),
        ("DECODE", 3, 4),
    ]
    wait = story.spans[0]
    assert (wait.reason, wait.num_verdicts, wait.need, wait.first_have, wait.have) == (
        Reason.NO_KV,
        2,
        20,
        10,
        14,
    )
    assert (story.prompt_len, story.max_new_tokens, story.tenant, story.cached_len) == (8, 16, "acme", 4)
    assert (story.finish, story.output_len) == (FinishKind.STOP, 3)
    assert story.arrived_s == pytest.approx(99.999)
    assert story.finished_s == pytest.approx(100.058)


def test_waits_for_different_reasons_are_different_spans(log):
    log.arrive("a")
    log.a_pass(refused("a", Reason.NO_KV))
    log.a_pass(refused("a", Reason.CHUNK_BUDGET))
    log.a_pass(refused("a", Reason.CHUNK_BUDGET))

    assert [(span.reason, span.num_passes) for span in log.story("a").spans] == [
        (Reason.NO_KV, 1),
        (Reason.CHUNK_BUDGET, 2),
    ]


def test_who_is_not_looked_at_shares_the_reason_of_the_rest(log):
    log.arrive("a")
    log.arrive("b")
    log.a_pass(refused("a"), num_waiting=2, num_rest=1, rest_reason=Reason.LOOK_AHEAD_SPENT)
    log.a_pass(refused("a"), num_waiting=2, num_rest=1, rest_reason=Reason.BEHIND)
    log.a_pass(refused("a"), refused("b"), num_waiting=2)

    timeline = log.timeline()

    (shared, own) = timeline.requests[1].spans
    assert (shared.reason, shared.first, shared.last, shared.num_verdicts) == (None, 0, 1, 0)
    assert (own.reason, own.first, own.last) == (Reason.NO_KV, 2, 2)
    assert timeline.passes.rest_reasons == [Reason.LOOK_AHEAD_SPENT, Reason.BEHIND, None]


def test_waiting_for_a_grammar_is_a_shared_reason(log):
    log.arrive("a")
    log.a_pass(num_grammar=1)
    assert log.timeline().passes.rest_reasons == [Reason.GRAMMAR_PENDING]


def test_a_prompt_in_chunks_ends_with_the_chunk_that_completes_it(log):
    log.arrive("a", prompt_len=20)
    log.a_pass(admitted("a", 8, Reason.CHUNKED))
    log.a_pass(continued=[continued("a", 8, remaining=12)])
    log.a_pass(continued=[continued("a", 4, remaining=4)])
    log.a_pass(num_decodes=1)

    story = log.story("a")

    assert [(span.kind.name, span.extend_len) for span in story.spans] == [
        ("PREFILL", 8),
        ("PREFILL", 8),
        ("PREFILL", 4),
        ("DECODE", 0),
    ]
    assert log.timeline().passes.prefill_tokens == [8, 8, 4, 0]


def test_a_prompt_that_stands_still_is_a_gap_and_one_without_memory_waits(log):
    log.arrive("a", prompt_len=20)
    log.a_pass(admitted("a", 8, Reason.CHUNKED))
    log.a_pass(num_decodes=3)
    log.a_pass(continued=[refused("a")])
    log.a_pass(continued=[continued("a", 12, remaining=12)])
    assert log.spans("a") == [("PREFILL", 0, 0), ("WAIT", 2, 2), ("PREFILL", 3, 3)]


def test_a_retracted_request_waits_from_that_pass_on(log):
    log.arrive("a")
    log.a_pass(admitted("a"))
    log.a_pass(num_decodes=1)
    log.a_pass(
        retractions=[Retraction("a", "recompute", "memory", 3, 1)],
        num_waiting=1,
        num_rest=1,
        rest_reason=Reason.RETRACTING,
    )
    log.a_pass(admitted("a"), num_waiting=1)

    story = log.story("a")

    assert log.spans("a") == [("PREFILL", 0, 0), ("DECODE", 1, 1), ("WAIT", 2, 2), ("PREFILL", 3, 3)]
    assert [(mark.kind, mark.pass_idx) for mark in story.marks] == [(MarkKind.RETRACTED, 2)]
    assert (
        story.marks[0].text == "retracted, to be computed again (memory): 3 pages, 1 token generated so far"
    )
    assert not story.spans[2].on_host


def test_a_swapped_request_is_on_the_host_until_it_comes_back(log):
    log.arrive("a")
    log.a_pass(admitted("a"))
    log.a_pass(retractions=[Retraction("a", "swap", "priority", 3, 1)], num_waiting=1)
    log.a_pass(refused("a"), num_waiting=1)
    log.a_pass(admitted("a", 1, Reason.SWAPPED_IN, prefix_len=9), num_waiting=1)
    log.a_pass(num_decodes=1)

    story = log.story("a")

    assert log.spans("a") == [
        ("PREFILL", 0, 0),
        ("WAIT", 1, 1),
        ("WAIT", 2, 2),
        ("PREFILL", 3, 3),
        ("DECODE", 4, 4),
    ]
    assert [span.on_host for span in story.spans] == [False, True, True, False, False]
    assert [(mark.kind, mark.pass_idx) for mark in story.marks] == [
        (MarkKind.SWAPPED_OUT, 1),
        (MarkKind.SWAPPED_IN, 3),
    ]


def test_what_comes_back_from_the_host_may_be_computed_further_in_chunks(log):
    log.arrive("a", prompt_len=40)
    log.a_pass(admitted("a", 8, Reason.SWAPPED_IN, prefix_len=9))
    log.a_pass(num_decodes=1)
    log.a_pass(continued=[continued("a", 8, remaining=8)])
    log.a_pass(num_decodes=2)
    assert log.spans("a") == [("PREFILL", 0, 0), ("PREFILL", 2, 2), ("DECODE", 3, 3)]


def test_with_overlap_the_surplus_step_is_not_counted(log):
    """The pass after the last token was planned before the end was known."""
    log.arrive("a")
    log.a_pass(admitted("a"), settle=False)
    log.a_pass(num_decodes=1, settle=False)
    log.settle(1)
    log.a_pass(num_decodes=1, settle=False)
    log.settle(2, Finished("a", FinishKind.LENGTH, 2))
    log.settle(3)
    assert log.spans("a") == [("PREFILL", 0, 0), ("DECODE", 1, 1)]


def test_an_abort_between_steps_ends_a_wait_at_the_last_pass(log):
    log.arrive("a")
    log.a_pass(num_waiting=1, num_rest=1, rest_reason=Reason.NO_ROW)
    log.records.append(Settled(100.02, 0, left=[Finished("a", FinishKind.ABORT, 0, "the client is gone")]))
    log.a_pass()

    story = log.story("a")

    assert log.spans("a") == [("WAIT", 0, 0)]
    assert (story.finish, story.message) == (FinishKind.ABORT, "the client is gone")


def test_requests_from_before_the_log_and_without_an_end_are_told_as_far_as_known(log):
    log.a_pass(retractions=[Retraction("old", "recompute", "memory", 1, 1)], num_decodes=2)
    log.a_pass(left=[Finished("older", FinishKind.STOP, 9)], num_decodes=1)
    log.arrive("late")

    timeline = log.timeline()

    assert [story.rid for story in timeline.requests] == ["old", "older", "late"]
    assert log.spans("old") == [("WAIT", 0, 1)]
    assert log.spans("older") == [("DECODE", 0, 1)]
    assert log.spans("late") == []
    assert timeline.requests[0].arrived_s is None
    assert timeline.requests[2].finish is None


def test_an_id_may_come_again_after_its_answer(log):
    log.arrive("a")
    log.a_pass(admitted("a"), left=[Finished("a", FinishKind.STOP, 1)])
    log.arrive("a")
    log.a_pass(admitted("a"))
    assert [story.spans[0].first for story in log.timeline().requests] == [0, 1]


def test_figures_of_passes(log):
    log.a_pass(
        num_waiting=4,
        num_running=3,
        num_decodes=2,
        evicted_pages=5,
        pages=PageCounts(1, 2, 3, 4),
        policy="lpm",
        notes=["policy lpm -> fcfs"],
        budget_before=BudgetState(100, 120, 64, 32),
        budget_after=BudgetState(-7, 20, 40, 8),
    )
    log.a_pass(mode=ForwardMode.IDLE, step_id=0)

    passes = log.timeline().passes

    assert len(passes) == 2
    assert (passes.num_waiting[0], passes.num_running[0], passes.num_decodes[0]) == (4, 3, 2)
    assert (
        passes.free_pages[0],
        passes.evictable_pages[0],
        passes.locked_pages[0],
        passes.held_pages[0],
    ) == (
        1,
        2,
        3,
        4,
    )
    assert (passes.kv_before, passes.kv_after) == ([100, -1], [0, -1])
    assert (passes.step_before, passes.step_after) == ([32, -1], [8, -1])
    assert (passes.policies, passes.notes) == (["lpm", ""], {0: ["policy lpm -> fcfs"]})
    assert passes.step_s == pytest.approx([0.007, 0.0])
    assert passes.end_s == pytest.approx([100.018, 100.02])


def test_a_step_ends_when_the_next_pass_begins_where_they_overlap(log):
    log.a_pass(settle=False)
    log.a_pass(settle=False)
    log.records.append(Settled(100.025, 1, 0.014))
    log.records.append(Settled(100.035, 2, 0.014))
    assert log.timeline().passes.end_s == pytest.approx([100.02, 100.035])


def test_a_window_is_numbered_from_its_first_pass(log):
    log.arrive("a")
    log.a_pass(refused("a"))
    log.a_pass(admitted("a"), notes=["x"])
    for _ in range(4):
        log.a_pass(num_decodes=1)
    log.arrive("b")
    log.a_pass(refused("b"))

    window = log.timeline().window(from_s=0.015, to_s=0.035)  # the log begins at 99.999 s

    assert len(window.passes) == 2
    assert [(story.rid, story.spans[0].first, story.spans[-1].last) for story in window.requests] == [
        ("a", 0, 1)
    ]
    assert window.passes.notes == {0: ["x"]}


def test_only_some_requests_keeps_all_passes(sample_engine):
    timeline = read_timeline(sample_engine().records())
    rid = timeline.requests[3].rid
    part = timeline.only({rid})
    assert [story.rid for story in part.requests] == [rid]
    assert len(part.passes) == len(timeline.passes)


def test_a_log_without_a_pass_is_an_error(log):
    log.arrive("a")
    with pytest.raises(EmptyLogError, match="no scheduling pass"):
        log.timeline()


@pytest.mark.parametrize("settings", [{}, {"num_pages": 140}, {"prefill_alone": True, "num_pages": 160}])
def test_spans_of_a_request_never_overlap_and_tokens_add_up(sample_engine, settings):
    records = list(sample_engine(num_requests=60, **settings).records())
    timeline = read_timeline(records)

    for story in timeline.requests:
        assert all(before.last < after.first for before, after in itertools.pairwise(story.spans))
        assert story.finish is not None
        decoded = sum(
            timeline.passes.num_decodes[idx] > 0
            for span in story.spans
            if span.kind is SpanKind.DECODE
            for idx in range(span.first, span.last + 1)
        )
        assert decoded == story.output_len
    admitted_tokens = sum(
        verdict.extend_len
        for record in records
        if isinstance(record, PassRecord)
        for verdict in (*record.verdicts, *record.continued)
        if verdict.result is AddReqResult.CONTINUE
    )
    assert sum(timeline.passes.prefill_tokens) == admitted_tokens
    assert admitted_tokens == sum(
        span.extend_len
        for story in timeline.requests
        for span in story.spans
        if span.kind is SpanKind.PREFILL
    )


def wait(first, last, reason, have=0):
    return Span(SpanKind.WAIT, first, last, reason, num_verdicts=last - first + 1, have=have)


def test_coarsening_joins_short_waits_and_keeps_the_longest_reason():
    spans = [
        wait(0, 0, Reason.NO_KV),
        wait(1, 3, Reason.CHUNK_BUDGET, have=7),
        wait(4, 4, Reason.NO_KV),
        wait(5, 90, Reason.NO_ROW),
        Span(SpanKind.DECODE, 91, 99),
    ]

    coarse = coarsen(spans, 4)

    assert [(span.kind, span.first, span.last) for span in coarse] == [
        (SpanKind.WAIT, 0, 90),
        (SpanKind.DECODE, 91, 99),
    ]
    assert (coarse[0].reason, coarse[0].num_reasons, coarse[0].num_verdicts) == (Reason.NO_ROW, 4, 91)
    assert [span.num_reasons for span in coarsen(spans[3:], 4)] == [1, 1]


def test_coarsening_to_a_shared_reason_leaves_no_verdict():
    """Or the page would look for the reason of a verdict that has none."""
    for spans in (
        [Span(SpanKind.WAIT, 0, 8), wait(9, 9, Reason.NO_KV)],
        [wait(0, 0, Reason.NO_KV), Span(SpanKind.WAIT, 1, 9)],
    ):
        (span,) = coarsen(spans, 4)
        assert (span.first, span.last, span.reason, span.num_verdicts) == (0, 9, None, 0)
    (span,) = coarsen([wait(0, 8, Reason.NO_KV), Span(SpanKind.WAIT, 9, 9)], 4)
    assert (span.reason, span.num_verdicts) == (Reason.NO_KV, 9)


def test_coarsening_leaves_long_neighbors_and_sums_chunks():
    long = [wait(0, 9, Reason.NO_KV), wait(10, 19, Reason.NO_ROW)]
    assert coarsen(long, 4) == long
    chunks = [Span(SpanKind.PREFILL, idx, idx, num_verdicts=1, extend_len=8) for idx in (0, 1, 3, 20)]
    assert [(span.first, span.last, span.extend_len, span.num_verdicts) for span in coarsen(chunks, 2)] == [
        (0, 3, 24, 3),
        (20, 20, 8, 1),
    ]


def test_memory_is_bounded_by_drawing_short_waits_together(sample_engine):
    builder = TimelineBuilder(max_spans=150)
    for record in sample_engine(num_requests=60, num_pages=160).records():
        builder.add(record)
    timeline = builder.build()
    full = read_timeline(sample_engine(num_requests=60, num_pages=160).records())

    assert timeline.resolution > 1
    assert sum(len(story.spans) for story in timeline.requests) < sum(
        len(story.spans) for story in full.requests
    )
    assert [story.output_len for story in timeline.requests] == [story.output_len for story in full.requests]


@pytest.mark.slow
def test_a_hundred_thousand_passes_are_read_in_seconds(sample_engine):
    records = list(sample_engine(num_requests=10_000, requests_per_s=13, num_pages=1200).records())
    num_passes = sum(isinstance(record, PassRecord) for record in records)
    assert num_passes > 80_000

    start = time.process_time()
    timeline = read_timeline(records)
    spent_s = time.process_time() - start

    assert (len(timeline.passes), len(timeline.requests)) == (num_passes, 10_000)
    assert spent_s < 15
