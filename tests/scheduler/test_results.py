"""What a settled step has to tell, with somebody who reads tokens as they come, and without."""

from __future__ import annotations

import numpy as np

from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import AbortRequest, GenerateRequest, TokenOutput
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepResult
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.scheduler import Scheduler


def make(*, streams: bool, chunk: int = 64, progress: bool = False) -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(max_running_requests=4, chunked_prefill_size=chunk),
        CacheConfig(page_size=4, max_total_tokens=256),
        Capacity(128, 64, 4, 4, 1000),
        frozenset(),
        streams=streams,
    )
    for number in range(2):
        prompt = np.arange(9, dtype=np.int32).tobytes()
        sampling = SamplingParams(max_new_tokens=4 + number, seed=1)
        reports = progress and not number
        scheduler.handle(GenerateRequest(f"r{number}", prompt, sampling, reports_progress=reports), 0.0)
    return scheduler


def step(scheduler: Scheduler, now_s: float) -> tuple[ScheduleBatch, list[TokenOutput]]:
    batch = scheduler.next_batch(now_s)
    assert batch is not None
    tokens = (100 + np.arange(len(batch.sampled), dtype=np.int32)).tobytes()
    scheduler.settle(batch, StepResult(batch.plan.step_id, tokens), now_s)
    return batch, [row for each in scheduler.take_outputs() for row in each.outputs]


def test_rows_are_in_batch_order_whoever_ends():
    scheduler = make(streams=True)
    rows = [step(scheduler, float(number))[1] for number in range(5)]
    assert [[row.rid for row in each] for each in rows] == [["r0", "r1"]] * 4 + [["r1"]]
    assert [row.usage.completion_tokens for each in rows for row in each if row.rid == "r1"] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert [row.token_ids for row in rows[1]] == [np.int32(each).tobytes() for each in (100, 101)]
    assert [row.finish is not None for row in rows[3]] == [True, False]


def test_where_nobody_reads_only_rows_that_say_more_are_made():
    """The plans are the same, so a simulation decides as a server does."""
    read, unread = make(streams=True), make(streams=False)
    rows: list[TokenOutput] = []
    for number in range(5):
        (batch, _), (other, news) = step(read, float(number)), step(unread, float(number))
        assert other.plan == batch.plan
        rows += news
    assert [(row.rid, row.usage.completion_tokens) for row in rows] == [
        ("r0", 1),
        ("r1", 1),
        ("r0", 4),
        ("r1", 5),
    ]
    assert unread.num_unfinished == 0


def test_who_left_its_row_is_no_longer_here():
    scheduler = make(streams=True)
    step(scheduler, 0.0)
    batch = scheduler.next_batch(1.0)
    assert batch is not None
    assert scheduler.rows_still_here(batch).tolist() == [True, True]
    scheduler.handle(AbortRequest("r0", "gone"), 1.0)
    assert scheduler.rows_still_here(batch).tolist() == [False, True]


def test_a_request_that_asks_is_notified_of_each_chunk_of_its_prompt_but_the_last():
    asked, silent = make(streams=True, chunk=4, progress=True), make(streams=True, chunk=4)
    for number in range(8):
        batch, rows = step(asked, float(number))
        other, silent_rows = step(silent, float(number))
        assert batch.plan == other.plan
        progress = [row for row in rows if row.usage.processed_tokens is not None]
        assert silent_rows == [row for row in rows if row not in progress]
        expected = [("r0", 4 * (number + 1))] if number < 2 else []
        assert [(row.rid, row.usage.processed_tokens) for row in progress] == expected
        assert all(not row.token_ids and row.options is None and row.finish is None for row in progress)
