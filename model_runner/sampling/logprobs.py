"""Log-probabilities of the model's own distribution: before temperature, filters, penalties and biases."""

# Shapes: n rows of logits, V tokens of the vocabulary, k likeliest tokens.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.transport.message_base import Logprobs


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


def concatenate(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Concatenate the parts in order; all have the same k."""
    return TokenLogprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
