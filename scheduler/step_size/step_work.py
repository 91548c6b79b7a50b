"""`StepWork`: the amounts of work that determine the time of a step; `work_of` counts them for a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import TOKEN_ID_BYTES
from ..batch import ScheduleBatch


class StepWork(NamedTuple):
    """The work of one step; padding included, if a policy pads.

    Attributes:
        prefill_tokens: prompt tokens that are computed.
        prefill_pairs: (query, key) pairs of their attention.
        decode_rows: requests that generate from their last token alone.
        kv_tokens: tokens of KV that the step reads: all earlier ones of each decode, those before each chunk.
        num_sampled: tokens that are sampled.
        swapped_tokens: tokens of KV that are copied to or from the host.
    """

    prefill_tokens: int
    prefill_pairs: float
    decode_rows: int
    kv_tokens: int
    num_sampled: int
    swapped_tokens: int = 0


def work_of(
    batch: ScheduleBatch, page_size: int, transferred: npt.NDArray[np.bool_] | None = None
) -> StepWork:
    """Count a step's work, without padding.

    Args:
        transferred: [num_extends] prompts with KV from another replica: they cost as much as a decode.
    """
    plan, end, num_extends = batch.plan, batch.end, batch.num_extends
    swapped = (len(plan.swap_outs) + len(plan.swap_ins)) // (2 * TOKEN_ID_BYTES) * page_size
    if batch.num_drafts:  # never in a step with extends; a draft costs as much as a prompt token with logits
        drafts = np.frombuffer(plan.num_drafts, dtype=np.int32).astype(np.int64)
        pairs = drafts * end + drafts * (drafts + 1) / 2
        num_drafts = batch.num_drafts
        return StepWork(
            num_drafts, float(pairs.sum()), len(end), int(end.sum()), len(end) + num_drafts, swapped
        )
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
