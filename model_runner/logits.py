"""Changes to the logits before a token is chosen: penalties, biases, tokens that must not come yet."""

# Shapes: S requests that sample in this step, n of them with penalties, V tokens of the vocabulary.

from __future__ import annotations

import torch
from torch import Tensor

from .sampling_batch import LogitEdits, Penalties, SamplingBatch
from .token_counts import TokenCounts


def process_logits(logits: Tensor, batch: SamplingBatch, counts: TokenCounts) -> Tensor:
    """Apply what the requests of the batch ask for.

    Args:
        logits: [S, V] float32, the model's own; left as they are, because log-probabilities are taken from them.

    Returns:
        [S, V] float32: `logits` itself where nothing is asked for.
    """
    if batch.penalties is None and batch.edits is None:
        return logits
    logits = logits.clone()
    if batch.penalties is not None:
        _penalise(logits, batch.penalties, counts)
    if batch.edits is not None:
        _edit(logits, batch.edits)
    return logits


def _penalise(logits: Tensor, penalties: Penalties, counts: TokenCounts) -> None:
    """In this order: the repetition penalty scales the model's logits, the other two are subtracted."""
    rows = logits.index_select(0, penalties.indices)
    in_output = counts.in_output.index_select(0, penalties.slots)
    is_in_output = in_output > 0
    seen = counts.in_prompt.index_select(0, penalties.slots).logical_or_(is_in_output)
    scaled = torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition)
    rows = torch.where(seen, scaled, rows)
    rows -= penalties.frequency * in_output
    rows -= penalties.presence * is_in_output
    logits.index_copy_(0, penalties.indices, rows)


def _edit(logits: Tensor, edits: LogitEdits) -> None:
    logits.index_put_((edits.rows, edits.token_ids), edits.values, accumulate=True)
