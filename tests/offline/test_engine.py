"""`EngineThread` when things go wrong on its thread: every caller hears of it, nobody waits for ever."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from engine.detokenizer.manager import Detokenizer
from engine.offline.engine import EngineParts, EngineThread, RowQueue, wait_s
from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.errors import ConfigError, EngineDeadError
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import (
    HEARTBEAT_INTERVAL_S,
    Explain,
    Explanation,
    FinishKind,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    PinDone,
    PinPrefix,
)
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import GetMasks, GoOn, StepPlan, StepResult, no_masks, to_the_end
from engine.scheduler.journal.recorder import Recorder
from engine.scheduler.pipeline import Pipeline
from engine.scheduler.scheduler import Scheduler

CAPACITY = Capacity(max_model_len=64, num_pages=16, page_size=4, max_running_requests=4, vocab_size=32)


class Letters:
    """Token i is the i-th letter."""

    def token_bytes(self, token_id):
        return bytes([97 + token_id])

    def is_special(self, token_id):
        return False


class Done:
    """A step that is over."""

    def __init__(self, result):
        self.result = result

    def wait(self):
        return self.result


class ScriptedRunner:
    """Samples 0, 1, 2, ... for every row; `before_step` may fail or block."""

    def __init__(self, before_step=lambda step_id: None):
        self.before_step = before_step

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks):
        self.before_step(plan.step_id)
        num_sampled = int(np.frombuffer(plan.samples, dtype=np.uint8).sum())
        tokens = np.full(num_sampled, (plan.step_id - 1) % 26, dtype=np.int32)
        return Done(StepResult(plan.step_id, tokens.tobytes()))


class MultiStepRunner(ScriptedRunner):
    """Makes bursts of one request: each round samples the next letter; `between` is called before one is asked for."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.num_tokens = 0

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks):
        tokens: list[int] = []
        for number in range(plan.num_rounds if plan.rows else 0):
            if number:
                self.between(number)
                if not go_on(np.int32(tokens[-1]).tobytes()):
                    break
            tokens.append(self.num_tokens % 26)
            self.num_tokens += 1
        token_ids, counts = np.array(tokens, dtype=np.int32), np.array([len(tokens)], dtype=np.int32)
        # 1 ms a round, as the scheduler is told
        return Done(
            StepResult(
                plan.step_id,
                token_ids.tobytes(),
                forward_s=0.001 * len(tokens),
                num_next_tokens=counts.tobytes() if len(tokens) > 1 else b"",
            )
        )


class Tier:
    """A thread of a tier; `closed`: the times that it was given to end."""

    def __init__(self):
        self.closed = []

    def send(self, commands):
        pass

    def close(self, timeout_s=0.5):
        self.closed.append(timeout_s)


def make_engine(
    before_step=lambda step_id: None, table=None, *, runner=None, overlap=False, tier=None, **settings
):
    def build(send):
        config = SchedulerConfig(chunked_prefill_size=16, max_running_requests=4, **settings)
        scheduler = Scheduler(config, CacheConfig(page_size=4), CAPACITY, frozenset())
        detokenizer = Detokenizer(table or Letters())
        recorder = Recorder()
        made = runner or ScriptedRunner(before_step)
        pipeline = Pipeline(scheduler, made, recorder, time.monotonic, overlap=overlap)
        return EngineParts(scheduler, pipeline, detokenizer, CAPACITY, recorder, tier, 7.0)

    return EngineThread(build)


def row_queue() -> RowQueue:
    return queue.SimpleQueue()


def request(rid, max_new_tokens=4, stop=(), num_prompt_tokens=3, **wishes):
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0, stop=stop)
    ids = np.arange(num_prompt_tokens, dtype=np.int32).tobytes()
    return GenerateRequest(rid, ids, sampling, arrival_s=time.monotonic(), **wishes)


def read(rows, count=1):
    """Rows until `count` requests have finished."""
    seen = []
    while count:
        seen.append(rows.get(timeout=30))
        if isinstance(seen[-1], EngineDeadError) or seen[-1].finish is not None:
            count -= 1
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_come_in_order_and_the_last_one_finishes(overlap):
    engine, rows = make_engine(overlap=overlap), row_queue()
    engine.submit(request("a"), rows)
    seen = read(rows)
    assert "".join(row.text for row in seen) == "abcd"
    assert [row.finish is not None for row in seen] == [False, False, False, True]
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_step_reaches_every_request_and_every_later_call(overlap):
    submitted = threading.Event()

    def fail(step_id):
        assert submitted.wait(30)
        if step_id == 3:
            raise RuntimeError("device on\nfire")

    tier = Tier()
    engine, rows = make_engine(fail, overlap=overlap, tier=tier), row_queue()
    for rid in "ab":
        engine.submit(request(rid, max_new_tokens=50), rows)
    submitted.set()
    errors = [row for row in read(rows, count=2) if isinstance(row, EngineDeadError)]
    message = "the engine stopped because of an error: RuntimeError: device on fire"
    assert [str(error) for error in errors] == [message, message]
    assert isinstance(errors[0].__cause__, RuntimeError)
    with pytest.raises(EngineDeadError, match="RuntimeError: device on fire"):
        engine.submit(request("c"), rows)
    with pytest.raises(EngineDeadError, match="RuntimeError: device on fire"):
        engine.call(FlushCache(), FlushCacheDone)
    engine.abort("a", "too late")
    engine.close()
    assert tier.closed == [0.0], "its thread would keep the memory of the pool"


def test_a_batch_begins_in_one_step():
    """Also if the thread that submits it is held up in between: all have prompts of one step, and are over then."""
    step_ids: list[int] = []
    tier = Tier()
    engine, rows = make_engine(step_ids.append, tier=tier), row_queue()
    engine.submit_all([request(rid, max_new_tokens=1) for rid in "abc"], rows)
    read(rows, count=3)
    assert step_ids[:1] == [1] and len(step_ids) <= 2  # the last one tells the runner who has left
    engine.close()
    assert tier.closed == [7.0]


def test_errors_of_the_start_come_out_as_they_are():
    def build(send):
        raise ConfigError("no such weights")

    with pytest.raises(ConfigError, match="^no such weights$"):
        EngineThread(build)


def test_closing_ends_what_runs():
    started, gate = threading.Event(), threading.Event()

    def hold(step_id):
        started.set()
        assert gate.wait(30)

    engine, rows = make_engine(hold), row_queue()
    engine.submit(request("a", max_new_tokens=50), rows)
    assert started.wait(30)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.set()
    (*_, last) = read(rows)
    closing.join(30)
    assert isinstance(last, EngineDeadError)
    assert str(last) == "the engine has been closed; make a new LLM"


def test_an_abort_is_answered_with_a_finished_row():
    engine, rows = make_engine(), row_queue()
    engine.submit(request("a", max_new_tokens=50), rows)
    rows.get(timeout=30)
    engine.abort("a", "enough")
    (*_, last) = read(rows)
    assert (last.finish.kind, last.finish.message) in {(FinishKind.ABORT, "enough"), (FinishKind.LENGTH, "")}
    assert engine.call(FlushCache(), FlushCacheDone).kept_tokens == 0
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_frees_the_request_in_the_scheduler(overlap):
    engine, rows = make_engine(overlap=overlap), row_queue()
    engine.submit(request("a", max_new_tokens=50, stop=("cd",)), rows)
    seen = read(rows)
    assert "".join(row.text for row in seen) == "ab"
    assert seen[-1].finish.matched == "cd"
    engine.submit(request("b", max_new_tokens=1), rows)
    read(rows)
    assert engine.call(FlushCache(), FlushCacheDone).kept_tokens == 0
    assert rows.empty()
    engine.close()


def test_a_stop_string_within_a_burst_ends_the_text_there():
    runner = MultiStepRunner(lambda number: None)
    engine, rows = make_engine(runner=runner, multi_step_ms=1e6), row_queue()
    engine.submit(request("a", max_new_tokens=50, stop=("ef",)), rows)
    seen = read(rows)
    assert "".join(row.text for row in seen) == "abcd"
    assert seen[-1].usage.completion_tokens == 6
    assert runner.num_tokens == 2 + 8, "the prompt's, a single step's, and one burst"
    assert engine.call(FlushCache(), FlushCacheDone).kept_tokens == 0
    engine.close()


def test_who_comes_ends_a_burst():
    """The caller's thread hands a message over while the engine's thread computes."""
    lengths = []

    def between(number):
        lengths.append(number)
        if len(lengths) == 3:
            engine.abort("a", "enough")

    engine, rows = make_engine(runner=MultiStepRunner(between), multi_step_ms=1e6), row_queue()
    engine.submit(request("a", max_new_tokens=40), rows)
    (*_, last) = read(rows)
    assert (last.finish.kind, last.finish.message) == (FinishKind.ABORT, "enough")
    assert last.usage.completion_tokens == 2 + 3
    assert lengths == [1, 2, 3]
    engine.close()


class NoThirdLetter(Letters):
    """A table that is broken at one token."""

    def token_bytes(self, token_id):
        if token_id == 2:
            raise LookupError("no such token")
        return super().token_bytes(token_id)


def test_text_that_cannot_be_made_frees_the_request_in_the_scheduler():
    step_ids: list[int] = []
    engine, rows = make_engine(step_ids.append, NoThirdLetter()), row_queue()
    engine.submit(request("a", max_new_tokens=50), rows)

    (*_, last) = read(rows)

    assert last.finish.kind is FinishKind.ERROR
    assert engine.call(FlushCache(), FlushCacheDone).kept_tokens == 0
    assert len(step_ids) <= 4  # the last one has no tokens: it tells the runner who has left
    engine.close()


@pytest.mark.parametrize(
    ("num_unfinished", "wake_s", "expected"),
    [
        (0, None, None),
        (0, 100.25, 0.25),  # a question to answer, or a transfer to look after
        (0, 0.0, 1e-3),
        (1, None, HEARTBEAT_INTERVAL_S),
        (1, 100.25, 0.25),
        (1, 200.0, HEARTBEAT_INTERVAL_S),
        (1, 99.0, 1e-3),
    ],
)
def test_the_wait_ends_when_the_scheduler_may_act_by_itself(num_unfinished, wake_s, expected):
    assert wait_s(num_unfinished, wake_s, 100.0) == expected


def test_a_request_starts_when_the_policys_patience_ends_though_nobody_sends_anything():
    engine, rows = (
        make_engine(schedule_policy="static", static_batch_size=2, static_batch_wait=0.02),
        row_queue(),
    )
    engine.submit(request("alone"), rows)
    assert "".join(row.text for row in read(rows)) == "abcd"
    engine.close()


def test_a_request_ends_when_its_time_in_the_queue_is_over_though_nobody_sends_anything():
    engine, rows = (
        make_engine(schedule_policy="static", static_batch_size=2, static_batch_wait=3600.0),
        row_queue(),
    )
    engine.submit(request("alone", queue_timeout_s=0.02), rows)
    [last] = read(rows)
    assert (last.finish.kind, last.finish.status) == (FinishKind.ERROR, 503)
    assert "the limit is 0.02 s" in last.finish.message
    engine.close()


def test_pins_and_explanations_are_answered():
    engine, rows = make_engine(), row_queue()
    prompt = request("a", max_new_tokens=1, num_prompt_tokens=9)
    engine.submit(prompt, rows)
    read(rows)
    pinned = engine.call(PinPrefix(prompt.input_ids, 60.0), PinDone)
    assert (pinned.pinned_tokens, pinned.asked_tokens) == (8, 9)
    elsewhere = PinPrefix(prompt.input_ids, 60.0, "another namespace")
    assert engine.call(elsewhere, PinDone).pinned_tokens == 0
    assert engine.call(Explain("a"), Explanation).found
    assert not engine.call(Explain("b"), Explanation).found
    engine.close()
    with pytest.raises(EngineDeadError, match="has been closed"):
        engine.call(Explain("a"), Explanation)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_closing_gives_freed_memory_back_to_the_system():
    engine = make_engine()
    blocks = [bytes(4096) for _ in range(32_768)]  # 128 MiB in pieces that malloc keeps when they are freed
    last = blocks[-1]
    del blocks
    before_mib = resident_mib()
    engine.close()
    assert resident_mib() < before_mib - 64
    assert len(last) == 4096
