"""`TorchSamplerBackend`: samples with torch's own operations, on any device; on the CPU filtered by `row_filters`.

Filters are lower bounds of a token's logit, not positions in a sorted list. Tokens with equal logits, which are common
in bfloat16, are kept or dropped together, independent of the order of a sort. The filters apply in the order
temperature, top_k, top_p (of the survivors of top_k), min_p.
"""

# Shapes: S requests that sample in this step, n of them drawing, m of those filtered, V tokens of the vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..kernels import plain
from .logits import TokenLogprobs, process_logits, token_logprobs
from .noise import gumbel_noise, noise_of
from .row_filters import survivors
from .sampler_backend import SampledTokens
from .sampling_batch import Draw, Float32s, Int64s, SamplingBatch
from .token_counts import TokenCounts

_NOISE_ROWS_ON_CPU: Final = 4
"""Rows of noise made at a time, so that it stays in the cache: 32 rows of 49k take 2.3 ms, all at once 7 or more."""


class TorchSamplerBackend:
    """See `SamplerBackend`."""

    recorded_bytes: Sequence[int] = ()

    def __init__(self, counts: TokenCounts) -> None:
        self._counts = counts
        self._buffers = counts.buffers

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        logits = logits.float()
        # A sum with a NaN or inf is not finite: one pass, a quarter of the cost of isfinite().all().
        finite = logits.sum(dim=-1).isfinite()
        processed = process_logits(logits, batch, self._counts, self._buffers)
        token_ids = self._sample(processed, batch.draw)
        if batch.penalties is not None:
            indices, slots = self._buffers.put_all([batch.penalties.indices, batch.penalties.slots])
            self._counts.observe(slots, token_ids.index_select(0, indices))
        return SampledTokens(token_ids, finite)

    def capturable(self) -> None:
        return

    def logprobs(self, logits: Tensor, indices: Int64s, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        logits = logits.float()
        if len(indices) == len(logits) and np.array_equal(indices, np.arange(len(logits))):
            return token_logprobs(logits, token_ids, top_k)  # without a copy of the logits
        rows = self._buffers.put(indices)
        return token_logprobs(logits.index_select(0, rows), token_ids.index_select(0, rows), top_k)

    def _sample(self, logits: Tensor, draw: Draw | None) -> Tensor:
        """The argmax of each row, or a draw for the rows in `draw`: [S, V] float32 -> [S] int64."""
        if draw is None:
            return plain.argmax(logits)
        if len(draw.indices) == len(logits):
            return self._draw(logits, draw)
        indices = self._buffers.put(draw.indices)
        drawn = self._draw(logits.index_select(0, indices), draw)
        return plain.argmax(logits).index_copy_(0, indices, drawn)

    def _draw(self, logits: Tensor, draw: Draw) -> Tensor:
        """Draw one token per row: [n, V] -> [n]."""
        keys, temperature = self._buffers.put_all([draw.keys, draw.temperature[:, None]])
        logits = logits / temperature
        if logits.device.type == "cpu":
            return _draw_on_cpu(logits, keys, draw)
        floor = self._floor(logits, draw)
        if floor is not None:
            logits.masked_fill_(logits < floor, -torch.inf)
        return plain.argmax(gumbel_noise(keys, logits.shape[1]).add_(logits))

    def _floor(self, logits: Tensor, draw: Draw) -> Tensor | None:
        """The lowest logit that may still be drawn, [n, 1]; None without filters."""
        floors = []
        if draw.top_k is not None:
            floors.append(self._top_k_floor(logits, draw.top_k))
        if draw.top_p is not None:
            left = logits if not floors else logits.masked_fill(logits < floors[0], -torch.inf)
            floors.append(self._top_p_floor(left, draw.top_p))
        if draw.log_min_p is not None:
            log_min_p = self._buffers.put(draw.log_min_p[:, None])
            floors.append(logits.amax(dim=-1, keepdim=True) + log_min_p)
        if not floors:
            return None
        highest = floors[0]
        for floor in floors[1:]:
            highest = torch.maximum(highest, floor)
        return highest

    def _top_k_floor(self, logits: Tensor, top_k: Int64s) -> Tensor:
        limited = np.flatnonzero(top_k)
        indices, last = self._buffers.put_all([limited, top_k[limited, None] - 1])
        rows = logits.index_select(0, indices)
        kth = plain.largest(rows, int(top_k.max())).gather(1, last)
        return _unfiltered(logits).index_copy_(0, indices, kth)

    def _top_p_floor(self, logits: Tensor, top_p: Float32s) -> Tensor:
        limited = np.flatnonzero(top_p < 1.0)
        indices, mass = self._buffers.put_all([limited, top_p[limited, None]])
        rows = logits.index_select(0, indices)
        normalizer = rows.logsumexp(dim=-1, keepdim=True)
        floor = _nucleus_floor(rows, normalizer, mass)
        return _unfiltered(logits).index_copy_(0, indices, floor)


def _draw_on_cpu(logits: Tensor, keys: Tensor, draw: Draw) -> Tensor:
    """Draw from logits divided by the temperature, [n, V] -> [n]. Filtered rows need noise only for the survivors."""
    filtering, vocab_size = draw.filtering(), logits.shape[1]
    token_ids = np.empty(len(logits), dtype=np.int64)
    rest = np.flatnonzero(~filtering)
    for start in range(0, len(rest), _NOISE_ROWS_ON_CPU):
        stop = start + _NOISE_ROWS_ON_CPU
        # A slice if all rows are unfiltered: it needs no copy.
        rows = slice(start, stop) if len(rest) == len(logits) else rest[start:stop]
        token_ids[rows] = plain.argmax(gumbel_noise(keys[rows], vocab_size).add_(logits[rows])).numpy()
    for row in np.flatnonzero(filtering).tolist():
        left, values = survivors(
            logits[row].numpy(),
            top_k=0 if draw.top_k is None else int(draw.top_k[row]),
            top_p=1.0 if draw.top_p is None else float(draw.top_p[row]),
            log_min_p=-np.inf if draw.log_min_p is None else float(draw.log_min_p[row]),
        )
        noise = noise_of(keys[row : row + 1], torch.from_numpy(left.astype(np.int32)))[0].numpy()
        token_ids[row] = left[(noise + values).argmax()]
    return torch.from_numpy(token_ids)


def _nucleus_floor(logits: Tensor, normalizer: Tensor, mass: Tensor) -> Tensor:
    """The lowest logit of the smallest set of tokens with this mass: [m, 1]."""
    descending = plain.largest(logits, logits.shape[1])
    total = (descending - normalizer).exp_().cumsum(dim=-1)
    last = (total < mass).sum(dim=-1, keepdim=True).clamp_max_(logits.shape[1] - 1)
    return descending.gather(1, last)


def _unfiltered(logits: Tensor) -> Tensor:
    return logits.new_full((logits.shape[0], 1), -torch.inf)
