"""`Sampler`: from logits to tokens.

Greedy requests take the exact argmax, the first of equals. The others draw by the Gumbel-max trick with noise that
depends on seed, position and token only (see `noise`), so neither the batch nor its order matters.

Filters are lower bounds on a token's logit, never positions in a sorted list: tokens with equal logits, which are
common in bfloat16, are kept or dropped together, whatever order a sort would put them in. They apply in the order
temperature, top_k, top_p (of what top_k left), min_p.
"""

# Shapes: S requests that sample in this step, n of them drawing, m of those filtered, V tokens of the vocabulary.

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from . import ops
from .logits import process_logits
from .logprobs import TokenLogprobs, token_logprobs
from .noise import gumbel_noise
from .sampling_batch import Draw, SamplingBatch, TopK, TopP
from .token_counts import TokenCounts

_NUCLEUS_CANDIDATES: Final = 1024
"""Likeliest tokens that usually hold the mass of top_p."""


_NOISE_ROWS_ON_CPU: Final = 4
"""Rows whose noise is made at a time: it stays in the cache; 32 rows of 49k take 2.3 ms, all at once 7 or more."""


class Sampled(NamedTuple):
    """What was sampled, on the device.

    Attributes:
        token_ids: [S] int64.
        finite: [S] bool; where False the logits were not numbers and the token is arbitrary.
        logprobs: of the requests in `SamplingBatch.logprobs`, with their largest k.
    """

    token_ids: Tensor
    finite: Tensor
    logprobs: TokenLogprobs | None


class Sampler:
    """Chooses tokens and counts them for the penalties."""

    def __init__(self, counts: TokenCounts) -> None:
        self._counts = counts

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Choose one token per row.

        Args:
            logits: [S, V] float32.
        """
        # The sum is not finite if any logit is not: one pass, a quarter of the cost of isfinite().all().
        finite = logits.sum(dim=-1).isfinite()
        processed = process_logits(logits, batch, self._counts)
        token_ids = choose(processed, batch.draw)
        if batch.penalties is not None:
            self._counts.observe(batch.penalties.slots, token_ids.index_select(0, batch.penalties.indices))
        logprobs = None
        if batch.logprobs is not None:
            wanted = batch.logprobs.indices
            logprobs = token_logprobs(
                logits.index_select(0, wanted), token_ids.index_select(0, wanted), max(batch.logprobs.top_k)
            )
        return Sampled(token_ids, finite, logprobs)


def choose(logits: Tensor, draw: Draw | None) -> Tensor:
    """The argmax, or a draw where asked for: [S, V] float32 -> [S] int64."""
    if draw is None:
        return ops.argmax(logits)
    if draw.indices is None:
        return _draw(logits, draw)
    drawn = _draw(logits.index_select(0, draw.indices), draw)
    return ops.argmax(logits).index_copy_(0, draw.indices, drawn)


def _draw(logits: Tensor, draw: Draw) -> Tensor:
    """[n, V] -> [n]."""
    logits = logits / draw.temperature
    floor = _floor(logits, draw)
    if floor is not None:
        logits.masked_fill_(logits < floor, -torch.inf)
    num_rows, vocab_size = logits.shape
    block = _NOISE_ROWS_ON_CPU if logits.device.type == "cpu" else num_rows
    return torch.cat(
        [
            ops.argmax(
                gumbel_noise(draw.keys[start : start + block], vocab_size).add_(logits[start : start + block])
            )
            for start in range(0, num_rows, block)
        ]
    )


def _floor(logits: Tensor, draw: Draw) -> Tensor | None:
    """The lowest logit that may still be drawn, [n, 1]; None without filters."""
    floors = []
    if draw.top_k is not None:
        floors.append(_top_k_floor(logits, draw.top_k))
    if draw.top_p is not None:
        left = logits if not floors else logits.masked_fill(logits < floors[0], -torch.inf)
        floors.append(_top_p_floor(left, draw.top_p))
    if draw.log_min_p is not None:
        floors.append(logits.amax(dim=-1, keepdim=True) + draw.log_min_p)
    if not floors:
        return None
    highest = floors[0]
    for floor in floors[1:]:
        highest = torch.maximum(highest, floor)
    return highest


def _top_k_floor(logits: Tensor, top_k: TopK) -> Tensor:
    rows = logits.index_select(0, top_k.indices)
    kth = ops.largest(rows, top_k.max_k).gather(1, top_k.last)
    return _unfiltered(logits).index_copy_(0, top_k.indices, kth)


def _top_p_floor(logits: Tensor, top_p: TopP) -> Tensor:
    rows = logits.index_select(0, top_p.indices)
    normaliser = rows.logsumexp(dim=-1, keepdim=True)
    num_candidates = rows.shape[1]
    if rows.device.type == "cpu":  # elsewhere looking at the mass found would mean waiting for the device
        num_candidates = min(num_candidates, _NUCLEUS_CANDIDATES)
    floor, found = _nucleus_floor(rows, normaliser, top_p.mass, num_candidates)
    if num_candidates < rows.shape[1] and not bool(found.all()):
        missed = (~found[:, 0]).nonzero()[:, 0]
        whole, _ = _nucleus_floor(rows[missed], normaliser[missed], top_p.mass[missed], rows.shape[1])
        floor.index_copy_(0, missed, whole)
    return _unfiltered(logits).index_copy_(0, top_p.indices, floor)


def _nucleus_floor(
    logits: Tensor, normaliser: Tensor, mass: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """The lowest logit of the smallest set with the mass, and whether the candidates hold that set; [m, 1] each."""
    descending = ops.largest(logits, num_candidates)
    total = (descending - normaliser).exp_().cumsum(dim=-1)
    last = (total < mass).sum(dim=-1, keepdim=True).clamp_max_(num_candidates - 1)
    return descending.gather(1, last), total[:, -1:] >= mass


def _unfiltered(logits: Tensor) -> Tensor:
    return logits.new_full((logits.shape[0], 1), -torch.inf)
