"""The slot table of the device follows the plans."""

from __future__ import annotations

import pytest
import torch

from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.memory.slot_table import SlotTable
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, NewReq, RowUpdate, StepPlan
from tests.model_runner.conftest import int32


def plan(new_reqs: tuple[NewReq, ...] = (), row_updates: tuple[RowUpdate, ...] = ()) -> StepPlan:
    return StepPlan(
        step_id=1,
        mode=ForwardMode.DECODE,
        rows=int32([0]),
        num_computed_tokens=int32([1]),
        num_scheduled_tokens=int32([1]),
        out_cache_loc=int32([77]),
        samples=bytes([1]),
        total_num_scheduled_tokens=1,
        new_reqs=new_reqs,
        row_updates=row_updates,
    )


def new(row: int, *prefix_loc: int) -> NewReq:
    return NewReq(f"r{row}", row, int32([5] * 4), 4, int32(prefix_loc), SamplingParams())


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(3, 5, InputBuffers(torch.device("cpu")))


def test_it_has_cached_prefixes_and_replaced_slots(table):
    table.update(plan((new(2, 8, 9), new(0)), (RowUpdate(1, 3, int32([40, 41])),)))
    assert table.req_to_token.tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 40, 41],
        [8, 9, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


def test_of_several_changes_of_a_slot_the_last_one_counts(table):
    updates = RowUpdate(2, 0, int32([60, 61])), RowUpdate(2, 1, int32([70, 71]))
    table.update(plan((new(2, 8, 9, 10, 11),), updates))
    assert table.req_to_token[2].tolist() == [60, 70, 71, 11, 0]


def test_slots_of_new_tokens_are_not_its_matter(table):
    table.update(plan())
    assert not table.req_to_token.any()


def test_slots_are_stored_by_flat_index(table):
    table.store(torch.tensor([1, 13]), torch.tensor([30, 31], dtype=torch.int32))
    assert table.req_to_token[0, 1] == 30 and table.req_to_token[2, 3] == 31
