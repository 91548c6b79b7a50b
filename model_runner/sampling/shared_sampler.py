"""Sampling with tensor parallelism: rank 0 samples and broadcasts the tokens to the other ranks.

Every rank needs the tokens on its device as input of the next step, and all must have the same tokens: after one
different token all later sums over ranks mix two different sequences. All ranks have the same logits and could sample
separately, but equal results would depend on equal kernels, libraries and chips on all ranks, and a difference would
not be detected. The broadcast costs one message of 8 bytes per request in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .logits import TokenLogprobs
from .sampler import Refused, Sampled

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.tp_group import TPGroup
    from .sampling_batch import SamplingBatch


class SamplerLike(Protocol):
    """Interface of a sampler for a `ModelRunner`; see `Sampler`."""

    @property
    def recorded_bytes(self) -> Sequence[int]: ...

    def sample(self, logits: Tensor, batch: SamplingBatch, refused: Refused | None = None) -> Sampled: ...

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs: ...


class LeadingSampler:
    """The sampler of rank 0: samples and broadcasts the tokens."""

    def __init__(self, sampler: SamplerLike, group: TPGroup) -> None:
        self._sampler = sampler
        self._group = group
        self.recorded_bytes = sampler.recorded_bytes

    def sample(self, logits: Tensor, batch: SamplingBatch, refused: Refused | None = None) -> Sampled:
        sampled = self._sampler.sample(logits, batch, refused)
        return sampled._replace(token_ids=self._group.broadcast(sampled.token_ids.contiguous()))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """The other ranks need no log-probabilities."""
        return self._sampler.token_logprobs(logits, token_ids, top_k)


class FollowingSampler:
    """The sampler of the other ranks: takes the tokens of rank 0. Only rank 0 reports finite flags and logprobs."""

    recorded_bytes: Sequence[int] = ()

    def __init__(self, group: TPGroup) -> None:
        self._group = group

    def sample(self, logits: Tensor, batch: SamplingBatch, refused: Refused | None = None) -> Sampled:
        """Grammars are known to rank 0 only."""
        num_rows = logits.shape[0]
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
        finite = torch.ones(num_rows, dtype=torch.bool, device=logits.device)
        return Sampled(self._group.broadcast(token_ids), finite, None)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Zeros of the right shapes: the results of this rank are not read."""
        token = torch.zeros(len(token_ids), device=logits.device)
        top_ids = torch.zeros((len(token_ids), top_k), dtype=torch.int32, device=logits.device)
        return TokenLogprobs(token, top_ids, torch.zeros_like(top_ids, dtype=torch.float32))


def shared_sampler(make_sampler: Callable[[], SamplerLike], group: TPGroup) -> SamplerLike:
    """The sampler of this rank. `make_sampler` runs only on the rank that samples, because it may compile kernels."""
    if group.size == 1:
        return make_sampler()
    return LeadingSampler(make_sampler(), group) if group.rank == 0 else FollowingSampler(group)
