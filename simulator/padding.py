"""The padding of a step: `NoPadding` for the engine, `StaticPadding` for static batching."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ..scheduler.batch import ScheduleBatch, StepWork


class PaddedWork(NamedTuple):
    """The device's work for a step.

    Attributes:
        work: padding included.
        padded_tokens: the padding in it: of prompts, and of rows that have finished.
    """

    work: StepWork
    padded_tokens: int


class Padding(Protocol):
    """Turns the scheduler's flat batch into the device's work."""

    def pad(self, batch: ScheduleBatch, work: StepWork) -> PaddedWork:
        """Called once per step, in order."""
        ...


class NoPadding:
    """A step is the flat list of its tokens."""

    __slots__ = ()

    def pad(self, batch: ScheduleBatch, work: StepWork) -> PaddedWork:
        return PaddedWork(work, 0)


class StaticPadding:
    """A batch is a rectangle: prompts are padded to the longest, and finished rows are computed until the batch ends.

    Prefill: n · max(length) tokens instead of their sum. Decode: as many rows as the batch began with, each reading as
    much KV as the longest. (Request-level scheduling in Orca, OSDI 2022.)
    """

    def __init__(self) -> None:
        self._num_rows = 0

    def pad(self, batch: ScheduleBatch, work: StepWork) -> PaddedWork:
        num_extends = batch.num_extends
        if num_extends:
            if not work.decode_rows:
                self._num_rows = 0  # no request runs: a new batch begins
            self._num_rows += num_extends
            ends = batch.end[:num_extends]
            starts = np.frombuffer(batch.plan.num_computed_tokens, dtype=np.int32)[:num_extends]
            longest = int((ends - starts).max())
            tokens = longest * num_extends
            pairs = num_extends * longest * (float(starts.max()) + (longest + 1) / 2)
        else:
            tokens, pairs = 0, 0.0
        num_rows, kv_tokens = work.decode_rows, work.kv_tokens
        if work.decode_rows:
            num_rows = max(self._num_rows - num_extends, work.decode_rows)
            kv_tokens = num_rows * int(batch.end[num_extends:].max())
        padded = StepWork(tokens, pairs, num_rows, kv_tokens, work.num_sampled, work.swapped_tokens)
        return PaddedWork(padded, tokens - work.prefill_tokens + num_rows - work.decode_rows)
