"""Changes to the logits before sampling (penalties, biases, tokens not allowed yet, grammar masks), and logprobs.

The functions for log-probabilities take any logits: the model's own, or with `--logprobs-mode processed` those of
`rare_sampler.processed_logits`.
"""

# Shapes: S requests that sample in this step, n of them with a certain change, V tokens of the vocabulary, k
# likeliest tokens.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.step_plan import TokenMasks
from ...runtime.transport.message_base import Logprobs
from ..memory.io_buffers import InputBuffers
from .sampling_batch import LogitEdits, Penalties, SamplingBatch
from .token_counts import TokenCounts

_WORD_BITS = 32


def process_logits(
    logits: Tensor, batch: SamplingBatch, counts: TokenCounts, buffers: InputBuffers
) -> Tensor:
    """Apply the changes that the requests of the batch ask for.

    Args:
        logits: [S, V] float32, the model's own; not modified, because log-probabilities are taken from them.

    Returns:
        [S, V] float32: `logits` itself if there are no changes.
    """
    if not batch.processes_logits:
        return logits
    logits = logits.clone()
    if batch.penalties is not None:
        _penalize(logits, batch.penalties, counts, buffers)
    if batch.edits is not None:
        _edit(logits, batch.edits, buffers)
    if batch.grammar is not None:
        _forbid(logits, batch.grammar, buffers)
    return logits


def _penalize(logits: Tensor, penalties: Penalties, counts: TokenCounts, buffers: InputBuffers) -> None:
    """Apply penalties: first the repetition penalty scales the model's logits, then the other two are subtracted."""
    indices, slots, repetition, frequency, presence = buffers.put_all(
        [
            penalties.indices,
            penalties.slots,
            penalties.repetition[:, None],
            penalties.frequency[:, None],
            penalties.presence[:, None],
        ]
    )
    rows = logits.index_select(0, indices)
    in_output = counts.in_output.index_select(0, slots)
    is_in_output = in_output > 0
    seen = counts.in_prompt.index_select(0, slots).logical_or_(is_in_output)
    scaled = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows = torch.where(seen, scaled, rows)
    rows -= frequency * in_output
    rows -= presence * is_in_output
    logits.index_copy_(0, indices, rows)


def _edit(logits: Tensor, edits: LogitEdits, buffers: InputBuffers) -> None:
    rows, token_ids, values = buffers.put_all([edits.rows, edits.token_ids, edits.values])
    logits.index_put_((rows, token_ids), values, accumulate=True)


def _forbid(logits: Tensor, grammar: TokenMasks, buffers: InputBuffers) -> None:
    """Set logits to -inf where the mask bit is not set."""
    num_words = -(-logits.shape[1] // _WORD_BITS)
    assert grammar.bits.shape[1] >= num_words, "a mask that is shorter than the vocabulary"
    indices, words = buffers.put_all([grammar.indices, grammar.bits[:, :num_words]])
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    forbidden = words.unsqueeze(-1).bitwise_right_shift(bits).bitwise_and_(1).eq_(0).to(torch.bool)
    rows = logits.index_select(0, indices)
    rows.masked_fill_(forbidden.flatten(1)[:, : logits.shape[1]], -torch.inf)
    logits.index_copy_(0, indices, rows)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of n tokens.

    Attributes:
        token: [n] float32.
        top_ids: [n, k] int32, descending by probability.
        top: [n, k] float32.
    """

    token: Tensor
    top_ids: Tensor
    top: Tensor

    def through(self, fetch: Callable[[Tensor], Tensor]) -> TokenLogprobs:
        """The same in the host tensors that `OutputBuffers.fetch` returns."""
        return TokenLogprobs(fetch(self.token), fetch(self.top_ids), fetch(self.top))

    def pack(self, start: int, stop: int, top_k: int) -> Logprobs:
        """Tokens start..stop-1 with the first `top_k` <= k likeliest of each, for a message; host tensors only."""
        if top_k == 0:
            return Logprobs(self.token[start:stop].numpy().tobytes())
        return Logprobs(
            self.token[start:stop].numpy().tobytes(),
            self.top_ids[start:stop, :top_k].numpy().tobytes(),
            self.top[start:stop, :top_k].numpy().tobytes(),
            top_k,
        )


def token_logprobs(logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs:
    """Log-probabilities of given tokens and of the likeliest.

    Args:
        logits: [n, V] float32.
        token_ids: [n] int64.
        top_k: k, 0 for none.
    """
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    token = (logits.gather(1, token_ids[:, None]) - normalizer)[:, 0]
    top, top_ids = logits.topk(top_k, dim=-1)
    return TokenLogprobs(token, top_ids.to(torch.int32), top - normalizer)


def chosen_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[n, m] float32 log-probabilities of m tokens at each row: logits [n, V], token_ids [n, m] or [1, m] int64."""
    rows = logits.float()
    return rows.gather(1, token_ids.expand(len(rows), -1)) - rows.logsumexp(dim=-1, keepdim=True)


def ranks_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[n] int32 ranks of tokens, [n] int64, among logits, [n, V]: 1 for the likeliest; equal logits have one rank."""
    likelier = logits > logits.gather(1, token_ids[:, None])
    return likelier.sum(dim=-1, dtype=torch.int32) + 1


def concatenate(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Concatenate the parts in order; all have the same k."""
    return TokenLogprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
