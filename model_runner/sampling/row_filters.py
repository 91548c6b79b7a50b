"""What temperature's filters leave of one row, on the CPU: without sorting the vocabulary, and with few passes over it.

A bound that the filters' floor cannot be below leaves a few hundred or thousand candidates; only those are sorted, and
only what is left needs noise. Called by `TorchChooser`, which documents the filters.
"""

# Shapes: V tokens of the vocabulary, k tokens that are left.

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

_GROUP: Final = 64
"""Tokens of which only the largest counts for the bound of top_k."""

_MARGIN: Final = 0.01
"""In nats, below the bound of top_p: rounding must not hide a token of the nucleus."""


def survivors(logits: Float32s, top_k: int, top_p: float, log_min_p: float) -> tuple[Int64s, Float32s]:
    """Which tokens may be drawn.

    Args:
        logits: [V], over the temperature.
        top_k: 0 for all.
        top_p: 1 for all.
        log_min_p: -inf for all.

    Returns:
        Token ids [k], ascending, and their logits [k]; the likeliest token is always among them.
    """
    largest = logits.max()
    if not np.isfinite(largest):  # nothing to draw from: not numbers, or all forbidden
        first = np.array([logits.argmax()], dtype=np.int64)
        return first, logits[first]
    min_p_floor = largest + np.float32(log_min_p)
    bound, total = np.float32(-np.inf), 0.0
    if top_k > 0:
        bound = _bound_of_top_k(logits, top_k)
    elif top_p < 1.0:
        total = float(np.exp(logits - largest).sum(dtype=np.float64))
        # All tokens below it together have less than the mass that may be missing.
        bound = largest + np.float32(np.log(total * (1.0 - top_p) / len(logits)) - _MARGIN)
    if not (top_k > 0 and top_p < 1.0):  # else top_p needs the mass of all that top_k left
        bound = max(bound, min_p_floor)
    token_ids = np.flatnonzero(logits >= bound)
    values = logits[token_ids]
    if 0 < top_k < len(values):
        kept = values >= np.partition(values, -top_k)[-top_k]
        token_ids, values = token_ids[kept], values[kept]
    floor = min_p_floor
    if top_p < 1.0:
        descending = np.sort(values)[::-1]
        mass = np.cumsum(np.exp(descending - largest), dtype=np.float64)
        wanted = top_p * (total if top_k <= 0 else mass[-1])
        floor = max(floor, descending[min(int(np.searchsorted(mass, wanted)), len(mass) - 1)])
    kept = values >= floor
    return token_ids[kept], values[kept]


def _bound_of_top_k(logits: Float32s, top_k: int) -> np.float32:
    """A group's largest stands for one token: if k groups reach a number, so do k tokens."""
    num_groups = len(logits) // _GROUP
    if num_groups < top_k:
        return np.float32(-np.inf)
    groups = torch.from_numpy(logits[: num_groups * _GROUP]).view(num_groups, _GROUP)
    largest = groups.amax(dim=1).numpy()  # 6 us of 49k; numpy takes 49 along this axis
    bound: np.float32 = np.partition(largest, num_groups - top_k)[num_groups - top_k]
    return bound
