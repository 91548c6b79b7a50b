"""`work_of`: what a batch of the scheduler has to do, as the cost models count it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..scheduler.batch import ScheduleBatch
from .cost_model import StepWork
from .sim_request import TOKEN_ID_BYTES


def work_of(
    batch: ScheduleBatch, page_size: int, transferred: npt.NDArray[np.bool_] | None = None
) -> StepWork:
    """Count a step's work, without padding.

    Args:
        transferred: [num_extends] prompts whose KV came from another replica: they cost what a decode costs.
    """
    plan, end, num_extends = batch.plan, batch.end, batch.num_extends
    swapped = (len(plan.swap_outs) + len(plan.swap_ins)) // (2 * TOKEN_ID_BYTES) * page_size
    if not num_extends:
        return StepWork(0, 0.0, len(end), int(end.sum()), len(end), swapped)
    ends = end[:num_extends].astype(np.int64)
    starts = np.frombuffer(plan.num_computed_tokens, dtype=np.int32)[:num_extends].astype(np.int64)
    if transferred is not None:
        starts = np.where(transferred, ends - 1, starts)
    lengths = ends - starts
    pairs = lengths * starts + lengths * (lengths + 1) / 2
    num_decodes = len(end) - num_extends
    kv_tokens = int(end[num_extends:].sum()) + int(starts.sum())
    return StepWork(
        int(lengths.sum()), float(pairs.sum()), num_decodes, kv_tokens, len(batch.sampled), swapped
    )
