"""Tests of `scheduler/step_planner.py` and `batch.py`: planning takes, once; what it returns is a value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.scheduler.arrays import EMPTY
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.memory.kv_memory import RowMemory
from engine.scheduler.phases import Work
from engine.scheduler.requests.req import Chunk
from engine.scheduler.step_planner import plan_step

from .fake_runner import ints
from .harness import Harness


def memory_of(harness: Harness) -> RowMemory:
    return harness.scheduler._parts.memory


def state_of(memory: RowMemory) -> dict[str, Any]:
    """All that planning may change."""
    return {
        "num_computed": memory.states.num_computed.tolist(),
        "num_settled": memory.states.num_settled.tolist(),
        "pages": memory.pool.pages.tolist(),
        "epoch": memory.pool.epoch.tolist(),
        "left": list(memory.pool._left_rows),
        "moved": dict(memory.kv._moved),
        "copies": list(memory.kv._copies),
        "outs": len(memory.host._outs),
        "ins": len(memory.host._ins),
    }


@pytest.fixture
def before_a_plan(make_scheduler):
    """A scheduler in which one request decodes, and each kind of news waits for the next plan; and its next work."""

    def make() -> tuple[RowMemory, Work]:
        harness = make_scheduler(page_size=4, num_host_pages=8)
        harness.submit("stays", prompt_len=8, max_new_tokens=9)
        harness.submit("leaves", prompt_len=8, max_new_tokens=1)
        harness.step()
        memory, running = memory_of(harness), harness.scheduler._parts.requests.running
        memory.kv.grow(running.reqs[0].row, 12)
        memory.kv._moved[int(running.rows[0])] = (0, 1)
        memory.kv._copies.append((3, 4))
        memory.host.swap_out(np.array([5], dtype=np.int32))
        return memory, Work([], running.rows, running.reqs)

    return make


def test_a_plan_takes_what_the_runner_must_be_told_once(before_a_plan):
    memory, work = before_a_plan()
    (row,) = work.decode_rows.tolist()

    first = plan_step(2, work, memory).plan
    second = plan_step(3, work, memory).plan

    assert [ints(plan.num_computed_tokens) for plan in (first, second)] == [[8], [9]]
    assert memory.states.num_computed[row] == 10
    assert [len(ints(plan.finished_rows)) for plan in (first, second)] == [1, 0]
    assert [(update.row, update.start, len(ints(update.loc))) for update in first.row_updates] == [
        (row, 0, 4)
    ]
    assert second.row_updates == ()
    assert [ints(plan.page_copies) for plan in (first, second)] == [[3, 4], []]
    assert [ints(plan.swap_outs) for plan in (first, second)] == [[5, 0], []]


def test_the_same_state_gives_the_same_plan(before_a_plan):
    plans = []
    for _ in range(2):
        memory, work = before_a_plan()
        plans.append(plan_step(2, work, memory).plan)

    assert plans[0] == plans[1]


def test_a_batch_can_be_constructed_twice_and_changes_nothing(before_a_plan):
    memory, work = before_a_plan()
    planned = plan_step(2, work, memory)
    arguments = {name: getattr(planned, name) for name in ScheduleBatch.__struct_fields__}
    memory.pool._left_rows.append(3)  # news for the plan after this one
    memory.kv._copies.append((6, 7))
    before = state_of(memory)

    batches = [ScheduleBatch(**arguments) for _ in range(2)]

    assert batches[0].plan == batches[1].plan == planned.plan
    assert batches[0].checksum() == batches[1].checksum()
    assert len(batches[0]) == len(batches[1]) == 1
    assert all(batch.still_here(memory.pool).all() for batch in batches)
    assert state_of(memory) == before


@pytest.mark.parametrize("name", ScheduleBatch.__struct_fields__)
def test_a_batch_cannot_be_changed(before_a_plan, name):
    memory, work = before_a_plan()
    batch = plan_step(2, work, memory)

    with pytest.raises(AttributeError, match="immutable"):
        setattr(batch, name, None)


def test_chunks_are_counted_as_computed_up_to_their_end(make_scheduler):
    harness = make_scheduler(page_size=4, chunked_prefill_size=8)
    harness.submit(prompt_len=20)
    harness.step()
    memory, (req,) = memory_of(harness), harness.scheduler._parts.requests.partial
    memory.kv.grow(req.row, 16)

    batch = plan_step(2, Work([Chunk(req, 8, 8, is_first=False, is_last=False)], EMPTY, []), memory)

    assert memory.states.num_computed[req.row] == 16
    assert (batch.num_extends, batch.end.tolist(), batch.sampled.tolist()) == (1, [16], [])
