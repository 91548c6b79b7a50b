"""Rows that are sampled without a mask, checked, and sampled again if the token is refused: the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.sampling.native_backend import NativeSamplerBackend, reasons_against_native_backend
from engine.model_runner.sampling.sampler import Sampler
from engine.model_runner.sampling.sampler_backend import SamplerBackend
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import TokenMasks
from tests.selection import examples

from .sampling_rows import DEVICE, GREEDY, Batch, Row

VOCAB_SIZE = 130
BACKENDS = [TorchSamplerBackend]
if DEVICE.type == "cpu" and not reasons_against_native_backend(DEVICE):
    BACKENDS.append(NativeSamplerBackend)  # type: ignore[arg-type]
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="only a CPU has the tokens at once")

PARAMS = st.one_of(
    st.just(GREEDY),
    st.builds(SamplingParams, temperature=st.sampled_from([0.3, 1.0, 2.0]), seed=st.integers(0, 1000)),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 9),
        logit_bias=st.just({3: 5.0, 70: -100.0}),
        min_new_tokens=st.sampled_from([0, 4]),
    ),
)
ROWS = st.lists(
    st.tuples(PARAMS, st.none() | st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1)),
    min_size=1,
    max_size=6,
)


class Refusal:
    """Does what the scheduler does: fills the masks of the rows whose token their grammar does not allow."""

    def __init__(self, masks: TokenMasks | None) -> None:
        self.masks = masks
        self.num_refused = 0

    def __call__(self, token_ids: Any) -> TokenMasks | None:
        if self.masks is None:
            return None
        ids = token_ids[self.masks.indices]
        allowed = self.masks.bits.view(np.uint32)[np.arange(len(ids)), ids // 32] >> (ids % 32) & 1
        refused = allowed == 0
        self.num_refused += int(refused.sum())
        if not refused.any():
            return None
        return TokenMasks(self.masks.indices[refused], self.masks.bits[refused])


@pytest.mark.parametrize("backend", BACKENDS)
@given(rows=ROWS, seed=st.integers(0, 2**31))
@settings(max_examples=examples(60), deadline=None)
def test_checking_afterwards_gives_the_tokens_of_masks(backend: type[SamplerBackend], rows, seed):
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    batch = Batch(
        [Row(params, logits[n], allowed=allowed) for n, (params, allowed) in enumerate(rows)], VOCAB_SIZE
    )
    sampler = Sampler(batch.counts, backend(batch.counts))  # type: ignore[call-arg]
    masked = sampler.sample(batch.logits, batch.plan).token_ids.tolist()

    refusal = Refusal(batch.plan.grammar)
    free = replace(batch.plan, grammar=None)
    checked = sampler.sample(batch.logits, free, refusal).token_ids.tolist()

    assert checked == masked
    for token, (_, allowed) in zip(checked, rows, strict=True):
        assert allowed is None or token in allowed or not (allowed - {1})


def test_only_refused_rows_are_sampled_again():
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 7] = 9.0
    rows = [
        Row(GREEDY, logits[0], allowed={7, 9}),
        Row(GREEDY, logits[1], allowed={40}),
        Row(GREEDY, logits[2]),
    ]
    batch = Batch(rows, VOCAB_SIZE)
    refusal = Refusal(batch.plan.grammar)

    sampled = Sampler(batch.counts).sample(batch.logits, replace(batch.plan, grammar=None), refusal)

    assert sampled.token_ids.tolist() == [7, 40, 7]
    assert refusal.num_refused == 1
