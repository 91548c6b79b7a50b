"""`StatePlanner`: the runs of each step over the state slots, from its `StepPlan`."""

# Shapes: B requests.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .state_runs import Int64s, StateLayout, StateSave, plan_states

if TYPE_CHECKING:
    from ...runtime.step_plan import StepPlan


class StatePlanner:
    """Remembers of each row the last step, after which its state may be in the slot of an accepted draft.

    The state after each draft but the last is kept in a slot of its own. How many drafts were accepted shows in the
    row's next step, which begins after them; it loads the state from there.

    Attributes:
        layout: of the slots.
    """

    def __init__(self, layout: StateLayout) -> None:
        """Start without requests."""
        self.layout = layout
        self._prefix_len = np.zeros(layout.num_rows, dtype=np.int64)
        self._num_drafts = np.zeros(layout.num_rows, dtype=np.int64)

    def plan(
        self,
        plan: StepPlan,
        rows: Int64s,
        prefix_lens: Int64s,
        extend_lens: Int64s,
        num_drafts: Int64s | None = None,
    ) -> Int64s:
        """The runs of a step or of one of its rounds; see `plan_states`. Call once per step, when nothing can fail.

        Args:
            rows, prefix_lens, extend_lens, num_drafts: [B], see `BatchLayout`.
        """
        layout, loads = self.layout, {}
        for new in plan.new_reqs:
            self._num_drafts[new.row] = 0
            if new.checkpoint:
                loads[new.row] = layout.of_checkpoint(new.checkpoint)
        drafted = self._num_drafts[rows]
        accepted = prefix_lens - self._prefix_len[rows] - 1
        for idx in np.flatnonzero((drafted > 0) & (accepted < drafted)).tolist():
            assert accepted[idx] >= 0, f"row {rows[idx]} goes back to position {prefix_lens[idx]}"
            loads[int(rows[idx])] = layout.of_draft(int(rows[idx]), int(accepted[idx]))
        saves = [
            StateSave(row, position, layout.of_checkpoint(checkpoint))
            for row, position, checkpoint in np.frombuffer(plan.state_saves, dtype=np.int32)
            .reshape(-1, 3)
            .tolist()
        ]
        if num_drafts is not None:
            assert num_drafts.max() <= layout.max_drafts, "more drafts than slots"
            for idx in np.flatnonzero(num_drafts).tolist():
                row, first = int(rows[idx]), int(prefix_lens[idx]) + 1
                saves += [
                    StateSave(row, first + draft, layout.of_draft(row, draft))
                    for draft in range(int(num_drafts[idx]))
                ]
        self._prefix_len[rows] = prefix_lens
        self._num_drafts[rows] = 0 if num_drafts is None else num_drafts
        return plan_states(rows, prefix_lens, extend_lens, loads=loads, saves=saves)
