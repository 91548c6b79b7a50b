"""From which slot a row's step starts, after drafts of which some were accepted."""

from __future__ import annotations

import numpy as np
import pytest

from engine.model_runner.states.state_planner import StatePlanner
from engine.model_runner.states.state_runs import StateLayout, runs_in
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, NewReq, StepPlan

LAYOUT = StateLayout(num_rows=3, num_checkpoints=2, max_drafts=2)  # 0, 1..3, 4, 5..6, 7..12


def new(row: int, checkpoint: int = 0) -> NewReq:
    return NewReq("r", row, b"", 0, b"", SamplingParams(), checkpoint=checkpoint)


def runs(
    planner: StatePlanner,
    rows: list[int],
    prefix_lens: list[int],
    extend_lens: list[int],
    num_drafts: list[int] | None = None,
    *,
    news: tuple[NewReq, ...] = (),
    saves: list[tuple[int, int, int]] | None = None,
) -> list[tuple[int, ...]]:
    plan = StepPlan(
        1, ForwardMode.DECODE, new_reqs=news, state_saves=np.array(saves or [], dtype=np.int32).tobytes()
    )
    drafts = None if num_drafts is None else np.array(num_drafts, dtype=np.int64)
    found = planner.plan(plan, np.array(rows), np.array(prefix_lens), np.array(extend_lens), drafts)
    return [tuple(run) for run in runs_in(found)]


def test_the_slots_are_apart():
    slots = [*range(5), *(LAYOUT.of_checkpoint(n) for n in (1, 2))]
    slots += [LAYOUT.of_draft(row, accepted) for row in range(3) for accepted in range(2)]
    assert slots == list(range(13)) and LAYOUT.num_slots == 13


@pytest.mark.parametrize(("accepted", "slot"), [(0, 9), (1, 10), (2, 2)])
def test_a_step_begins_after_the_accepted_drafts(accepted, slot):
    planner = StatePlanner(LAYOUT)
    assert runs(planner, [1], [0], [5], news=(new(1),)) == [(0, 0, 5, 2)]
    assert runs(planner, [1, 0], [5, 3], [3, 1], [2, 0]) == [
        (2, 0, 1, 9),
        (9, 1, 2, 10),
        (10, 2, 3, 2),
        (1, 3, 4, 1),
    ]
    assert runs(planner, [1], [6 + accepted], [1]) == [(slot, 0, 1, 2)]
    assert runs(planner, [1], [7 + accepted], [1]) == [(2, 0, 1, 2)]


def test_a_new_request_in_the_row_starts_from_its_own_state():
    planner = StatePlanner(LAYOUT)
    runs(planner, [1], [5], [3], [2])
    assert runs(planner, [1], [4], [2], news=(new(1, checkpoint=2),)) == [(6, 0, 2, 2)]
    runs(planner, [1], [6], [3], [2])
    assert runs(planner, [1], [0], [2], news=(new(1),)) == [(0, 0, 2, 2)]


def test_a_checkpoint_before_drafts_is_also_a_state_to_go_on_with():
    planner = StatePlanner(LAYOUT)
    found = runs(planner, [0], [7], [2], [1], saves=[(0, 8, 1)])
    assert found == [(1, 0, 1, 5), (5, 1, 1, 7), (7, 1, 2, 1)]


def test_a_row_cannot_go_back_further():
    planner = StatePlanner(LAYOUT)
    runs(planner, [1], [5], [3], [2])
    with pytest.raises(AssertionError, match="row 1 goes back to position 4"):
        runs(planner, [1], [4], [1])
