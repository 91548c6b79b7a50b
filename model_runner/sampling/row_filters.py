"""`survivors`: applies top_k, top_p and min_p to one row on the CPU, with few passes and without a full sort.

A lower bound of the filters' floor leaves a few hundred or thousand candidates. Only the candidates are sorted, and
only the survivors need noise. Called by `TorchSamplerBackend`, which documents the filters.
"""

# Shapes: V tokens of the vocabulary, k tokens that survive the filters.

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

_GROUP: Final = 64
"""Tokens per group; the bound of top_k uses only the largest logit of each group."""

_MARGIN: Final = 0.01
"""Nats subtracted from the bound of top_p, so that rounding does not exclude a token of the nucleus."""


def survivors(logits: Float32s, top_k: int, top_p: float, log_min_p: float) -> tuple[Int64s, Float32s]:
    """Find the tokens that may be drawn.

    Args:
        logits: [V], divided by the temperature.
        top_k: 0 for all.
        top_p: 1 for all.
        log_min_p: -inf for all.

    Returns:
        Token ids [k], ascending, and their logits [k]; the likeliest token is always among them.
    """
    largest = logits.max()
    if not np.isfinite(largest):  # nothing to draw from: NaN, or all tokens masked
        first = np.array([logits.argmax()], dtype=np.int64)
        return first, logits[first]
    min_p_floor = largest + np.float32(log_min_p)
    bound, total = np.float32(-np.inf), 0.0
    if top_k > 0:
        bound = _bound_of_top_k(logits, top_k)
    elif top_p < 1.0:
        total = float(np.exp(logits - largest).sum(dtype=np.float64))
        # All tokens below the bound together have less mass than top_p may drop.
        bound = largest + np.float32(np.log(total * (1.0 - top_p) / len(logits)) - _MARGIN)
    if not (top_k > 0 and top_p < 1.0):  # else top_p needs the mass of all survivors of top_k
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
    """Lower bound of the k-th largest logit: if the maxima of k groups reach a value, at least k tokens do."""
    num_groups = len(logits) // _GROUP
    if num_groups < top_k:
        return np.float32(-np.inf)
    groups = torch.from_numpy(logits[: num_groups * _GROUP]).view(num_groups, _GROUP)
    largest = groups.amax(dim=1).numpy()  # 6 us for 49k logits; numpy takes 49 us along this axis
    bound: np.float32 = np.partition(largest, num_groups - top_k)[num_groups - top_k]
    return bound
