"""Who samples where ranks share a model, and by whom log-probabilities of prompts are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.sampling.logits import token_logprobs
from engine.model_runner.sampling.sampler import Sampler
from engine.model_runner.sampling.shared_sampler import shared_sampler
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.runtime.sampling_params import SamplingParams

CPU = torch.device("cpu")


class Group:
    """Of a rank that nobody talks to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def make_sampler() -> Sampler:
    return Sampler(TokenCounts(40, InputBuffers(CPU)))


class TestSharedSampler:
    def test_a_rank_that_follows_makes_no_sampler(self):
        """Making one compiles kernels."""
        following: Any = shared_sampler(lambda: pytest.fail("was made"), Group(1, 2))  # type: ignore[arg-type]

        logprobs = following.token_logprobs(torch.zeros(3, 40), torch.zeros(3, dtype=torch.int64), 5)

        assert [(one.shape, one.dtype) for one in logprobs] == [
            ((3,), torch.float32),
            ((3, 5), torch.int32),
            ((3, 5), torch.float32),
        ]

    @pytest.mark.parametrize("size", [1, 2])
    def test_rank_0_knows_how_likely_tokens_are(self, size):
        sampler = shared_sampler(make_sampler, Group(0, size))  # type: ignore[arg-type]
        logits, token_ids = torch.randn(4, 40), torch.tensor([3, 0, 39, 7])

        ours = sampler.token_logprobs(logits, token_ids, 6)

        expected = token_logprobs(logits, token_ids, 6)
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def test_prompts_are_looked_up_by_whoever_chooses(driver, monkeypatch):
    """Our kernels sort no vocabulary."""
    asked: list[tuple[int, list[int], int]] = []
    backend = driver.runner.sampler._backend
    own = backend.logprobs

    def logprobs(logits: Any, indices: Any, token_ids: Any, top_k: int) -> Any:
        asked.append((len(logits), indices.tolist(), top_k))
        return own(logits, indices, token_ids, top_k)

    monkeypatch.setattr(backend, "logprobs", logprobs)
    req = driver.start([3, 14, 15, 92, 65], SamplingParams(temperature=0.0, prompt_logprobs=2))
    driver.step([(req, 5)])

    assert asked == [(4, [0, 1, 2, 3], 2)]


def test_some_rows_in_any_order_and_all_of_them():
    backend = TorchSamplerBackend(TokenCounts(40, InputBuffers(CPU)))
    logits, token_ids = torch.randn(4, 40), torch.tensor([3, 0, 39, 7])
    whole = token_logprobs(logits, token_ids, 3)
    for indices in ([0, 1, 2, 3], [3, 2, 1, 0], [2], [1, 1, 0, 0]):
        ours = backend.logprobs(logits, np.array(indices), token_ids, 3)
        assert all(torch.equal(one, other[indices]) for one, other in zip(ours, whole, strict=True))
