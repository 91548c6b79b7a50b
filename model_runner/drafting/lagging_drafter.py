"""`LaggingDrafter`: a `Drafter` whose module computes every token of the model, but not in the same step; see `lag`.

Drafts are sampled with the noise that the model will use at the same position, and with the same filters, so that they
are right more often than independent samples. With greedy sampling they are the module's likeliest tokens.
"""

# Shapes: n requests with drafts, T tokens of a step, V tokens of the model's vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from .lag import Lag, Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ...runtime.step_plan import NewReq
    from ..input_batch import DraftRows, InputBatch
    from ..recording.executor import StepFeatures
    from .drafter import DrafterParts

Int64s = npt.NDArray[np.int64]

_NOTHING: Final[Int64s] = np.empty(0, dtype=np.int64)


class DraftModule(Protocol):
    """The network of a `LaggingDrafter`, with its keys and values. The tokens of a run follow those of earlier runs.

    Attributes:
        keeps_drafts: keys and values of drafts that were right need not be computed again.
    """

    @property
    def keeps_drafts(self) -> bool: ...

    def start(self, row: int, prefix_loc: Int64s) -> None:
        """A request with a cached prefix, [prefix_len] slots, got the row."""
        ...

    def keep(self, batch: InputBatch, features: StepFeatures, valid: Int64s) -> None:
        """Take what later runs need of a step, of which [n] tokens of each request are right."""
        ...

    def compute(self, run: Run) -> None:
        """Compute the tokens of a run for their keys and values only."""
        ...

    def logits(self, run: Run, *, first: bool) -> Tensor:
        """Compute the tokens of a run: [n, V] logits after the last one of each request, in the run's order.

        Args:
            first: these are tokens of the model; else the drafts that were sampled from the logits before.
        """
        ...


class LaggingDrafter:
    """A `Drafter`; see the module."""

    def __init__(self, module: DraftModule, lag: Lag, parts: DrafterParts) -> None:
        """Take the module that computes the tokens, and the parts of the runner."""
        self.module = module
        self._parts = parts
        self._lag = lag
        self._drafted: tuple[Int64s, Int64s] = (_NOTHING, _NOTHING)

    def start(self, new_reqs: Sequence[NewReq]) -> None:
        for new in new_reqs:
            prefix_loc = np.frombuffer(new.prefix_loc, dtype=np.int32).astype(np.int64)
            self._lag.start(new.row, len(prefix_loc))
            self.module.start(new.row, prefix_loc)

    def leave(self, rows: Int64s) -> None:
        waiting = self._lag.waiting(rows)
        if len(waiting):
            self.module.compute(self._lag.take(waiting))

    def draft(self, asked: DraftRows) -> npt.NDArray[np.int32]:
        rows, counts = asked.rows, asked.counts
        starts = np.cumsum(counts) - counts
        drafts = np.empty(int(counts.sum()), dtype=np.int64)
        run = self._lag.take_with(rows, asked.positions, self._last_ids(asked), asked.out_cache_loc[starts])
        drafts[starts[run.idx]] = self._sampled(run, asked.positions[run.idx] + 1, first=True)
        for number in range(1, int(counts.max())):
            live = np.flatnonzero(counts > number)
            places, positions = starts[live] + number, asked.positions[live] + number
            run = Run.of_one_each(
                live, rows[live], positions, drafts[places - 1], asked.out_cache_loc[places]
            )
            drafts[places] = self._sampled(run, positions + 1, first=False)
        self._drafted = rows, asked.positions + counts
        return drafts.astype(np.int32)

    def absorb(self, batch: InputBatch, features: StepFeatures, num_tokens: Tensor | None) -> None:
        layout, input_ids = batch.layout, features.input_ids.cpu().numpy()
        lens = layout.extend_lens
        valid = lens if num_tokens is None else num_tokens.cpu().numpy()
        drafted, self._drafted = self._drafted, (_NOTHING, _NOTHING)  # also if that step had no memory
        waits = (layout.decodes() == 1) & (lens <= self._lag.max_tokens)
        idx = np.flatnonzero(~waits)
        self.leave(layout.rows[idx])  # what waits comes first
        self.module.keep(batch, features, valid)
        if len(idx):
            run = Run.of_step(batch, input_ids, idx)
            self.module.compute(run)
            self._lag.done(run.rows, run.prefix_lens + valid[idx])
        idx = np.flatnonzero(waits)
        if not len(idx):
            return
        run = Run.of_step(batch, input_ids, idx)
        self._lag.add(run, valid[idx])
        if self.module.keeps_drafts:
            self._lag.reached(*drafted)
        full = self._lag.full(run.rows)
        if len(full):
            self.module.compute(self._lag.take(full))

    def _last_ids(self, asked: DraftRows) -> Int64s:
        """[n] the last tokens."""
        put = self._parts.buffers.put
        ids: Int64s = self._parts.relay.input_ids(put(asked.input_ids), put(asked.rows)).cpu().numpy()
        return ids

    def _sampled(self, run: Run, positions: Int64s, *, first: bool) -> Int64s:
        """[n] tokens at `positions` [n], after the last ones of a run, in its order."""
        sampling = self._parts.builder.draft_sampling(run.rows, positions)
        logits = self.module.logits(run, first=first)
        ids: Int64s = self._parts.sampler.sample(logits, sampling).token_ids.cpu().numpy()
        return ids
