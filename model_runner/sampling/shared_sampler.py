"""Sampling where several ranks share a model: rank 0 chooses, the others take what it chose.

Every rank needs the tokens on its device, as input of the next step, and all must have the same ones: a single token
that differs would give two texts, and sums over ranks of both, for ever after. All have the same logits, so each could
sample for itself, and would mostly choose alike; but "mostly" rests on the same kernels, libraries and chips
everywhere, and nothing would show when it fails. Handing out the tokens of rank 0 costs one message of 8 bytes per
request in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from .logprobs import TokenLogprobs
from .sampler import Sampled

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.tp_group import TPGroup
    from .sampling_batch import SamplingBatch


class SamplerLike(Protocol):
    """What a `ModelRunner` needs of a sampler; see `Sampler`."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled: ...

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs: ...


class LeadingSampler:
    """Of rank 0: samples, and hands out the tokens."""

    def __init__(self, sampler: SamplerLike, group: TPGroup) -> None:
        self._sampler = sampler
        self._group = group

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """See `Sampler.sample`."""
        sampled = self._sampler.sample(logits, batch)
        return sampled._replace(token_ids=self._group.broadcast(sampled.token_ids.contiguous()))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """See `Sampler.token_logprobs`; the other ranks need none."""
        return self._sampler.token_logprobs(logits, token_ids, top_k)


class FollowingSampler:
    """Of the other ranks: takes the tokens of rank 0. Whether logits were numbers, and how likely, rank 0 says."""

    def __init__(self, group: TPGroup) -> None:
        self._group = group

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """See `Sampler.sample`."""
        num_rows = logits.shape[0]
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
        finite = torch.ones(num_rows, dtype=torch.bool, device=logits.device)
        return Sampled(self._group.broadcast(token_ids), finite, None)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Zeros of the right shapes: nobody reads what this rank found."""
        token = torch.zeros(len(token_ids), device=logits.device)
        top_ids = torch.zeros((len(token_ids), top_k), dtype=torch.int32, device=logits.device)
        return TokenLogprobs(token, top_ids, torch.zeros_like(top_ids, dtype=torch.float32))


def shared_sampler(make_sampler: Callable[[], SamplerLike], group: TPGroup) -> SamplerLike:
    """The sampler of this rank; only one that samples is made, which may compile kernels first."""
    if group.size == 1:
        return make_sampler()
    return LeadingSampler(make_sampler(), group) if group.rank == 0 else FollowingSampler(group)
