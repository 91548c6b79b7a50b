"""`Sampler`: from logits to tokens, and to their log-probabilities.

Greedy requests take the exact argmax, the first of equals. The others draw by the Gumbel-max trick with noise that
depends on seed, position and token only (see `noise`), so neither the batch nor its order matters.
"""

# Shapes: S requests that sample in this step, V tokens of the vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .backend_selection import select_chooser
from .sampler_backend import TokenChooser
from .torch_backend import TorchChooser

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .logprobs import TokenLogprobs
    from .sampling_batch import SamplingBatch
    from .token_counts import TokenCounts


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

    def __init__(self, counts: TokenCounts, chooser: TokenChooser | None = None) -> None:
        """`chooser`: None for torch's operations."""
        self._chooser = chooser or TorchChooser(counts)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Choose one token per row.

        Args:
            logits: [S, V] float32.
        """
        token_ids, finite = self._chooser.choose(logits, batch)
        logprobs = None
        if batch.logprobs is not None:
            indices = np.array(batch.logprobs.sampled_idx, dtype=np.int64)
            logprobs = self._chooser.logprobs(logits, indices, token_ids, max(batch.logprobs.top_k))
        return Sampled(token_ids, finite, logprobs)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Log-probabilities of given tokens and of the likeliest: of prompts.

        Args:
            logits: [n, V] float32, the last axis contiguous.
            token_ids: [n] int64.
            top_k: 0 for none.
        """
        every_row = np.arange(len(logits), dtype=np.int64)
        return self._chooser.logprobs(logits, every_row, token_ids, top_k)


def make_sampler(counts: TokenCounts, device: torch.device) -> Sampler:
    """A sampler with the best that can choose on this device."""
    return Sampler(counts, select_chooser(counts, device))
