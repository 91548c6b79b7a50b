"""Sampling that is recorded: the same tokens as launched kernel by kernel, and nothing but a replay on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.recording.executor import RecordedDecodes
from engine.model_runner.recording.graphs.recorded_forward import RecordedSampler
from engine.model_runner.sampling.sampler_backend import SampledTokens
from engine.model_runner.sampling.triton_backend import Geometry, TritonSamplerBackend
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.recording.recording_device import RerunningDevice
from tests.model_runner.sampling.sampling_rows import DEVICE, GREEDY, Batch, Row, peaked
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

SMALL = Geometry(chunk=64, group=8, capacity=64, block=32)
VOCAB = 150
SIZES = [1, 2, 4, 6]


class CountingDevice(RerunningDevice):
    """Also counts copies to the device, and what the host launches outside of replays."""

    def __init__(self) -> None:
        super().__init__()
        self.uploaded: list[int] = []

    def upload(self, target: torch.Tensor, staged: torch.Tensor) -> Callable[[], None]:
        self.uploaded.append(target.nbytes)
        return super().upload(target, staged)


class Recorded:
    """A backend, recorded and not, and the memory where decodes leave their logits."""

    def __init__(self, counts: Any) -> None:
        self.device = CountingDevice()
        self.backend = TritonSamplerBackend(counts, SMALL)
        self.logits = torch.zeros((SIZES[-1], VOCAB), device=DEVICE)
        decodes = RecordedDecodes(self.logits, SIZES, self.device)
        self.sampler = RecordedSampler(decodes, self.backend, self.backend)

    def sample(self, batch: Batch) -> tuple[SampledTokens, SampledTokens]:
        """By the recording, and by the backend from a copy of the logits."""
        num = len(batch.rows)
        self.logits.fill_(torch.nan)  # what other rows hold is nobody's business
        self.logits[:num] = batch.logits
        ours = self.sampler.sample(self.logits[:num], batch.plan)
        ours = SampledTokens(ours.token_ids.clone(), ours.finite.clone())
        return ours, self.backend.sample(batch.logits.clone(), batch.plan)


def drawn(seed: int, **options: Any) -> Row:
    return Row(SamplingParams(seed=seed, temperature=0.3 + 0.4 * seed, **options), peaked(VOCAB, seed))


def same(ours: SampledTokens, theirs: SampledTokens) -> bool:
    return torch.equal(ours.token_ids, theirs.token_ids) and torch.equal(ours.finite, theirs.finite)


def test_greedy_rows_and_draws_are_replayed_and_get_the_same_tokens():
    rows = [Row(GREEDY, peaked(VOCAB, 90 + n)) for n in range(3)] + [drawn(n) for n in range(3)]
    batches = [
        Batch(part, VOCAB) for part in (rows[:1], rows[3:4], rows, rows[1:4], rows[:2], rows[2:5], rows[3:])
    ]
    recorded = Recorded(batches[2].counts)
    for number, batch in enumerate(batches, 1):
        assert same(*recorded.sample(batch))
        assert recorded.sampler.num_replayed == recorded.device.num_replayed == number
    # The tables of the batches with a draw, of the sizes 1, 6, 4, 4, 4, are all that is copied to the device.
    assert [num_bytes // 64 for num_bytes in recorded.device.uploaded] == [1, 6, 4, 4, 4]
    assert recorded.device.num_captured == 2 * len(SIZES) == 2 * len(recorded.sampler.recorded_bytes)


def test_a_row_whose_logits_are_no_numbers_is_found_and_harms_nobody():
    rows = [drawn(1), drawn(2), Row(GREEDY, peaked(VOCAB, 3))]
    rows[1].logits = torch.full((VOCAB,), torch.nan)
    batch = Batch(rows, VOCAB)
    ours, theirs = Recorded(batch.counts).sample(batch)
    assert same(ours, theirs)
    assert ours.finite.tolist() == [True, False, True]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "row",
    [
        drawn(1, top_k=5),
        drawn(2, repetition_penalty=1.5),
        drawn(3, logit_bias={4: 3.0}),
        Row(GREEDY, peaked(VOCAB, 4), allowed={3, 4, 5}),
    ],
    ids=["filter", "penalty", "bias", "mask"],
)
def test_what_is_not_recorded_is_sampled_as_ever(row):
    batch = Batch([Row(GREEDY, peaked(VOCAB, 9)), row], VOCAB)
    recorded = Recorded(batch.counts)
    before = batch.counts.in_output.clone()
    num = len(batch.rows)
    recorded.logits[:num] = batch.logits
    ours = recorded.sampler.sample(recorded.logits[:num], batch.plan)
    batch.counts.in_output.copy_(before)
    assert same(ours, recorded.backend.sample(batch.logits.clone(), batch.plan))
    assert recorded.sampler.num_replayed == 0


def test_logits_of_other_steps_are_sampled_as_ever():
    batch = Batch([drawn(1), drawn(2)], VOCAB)
    recorded = Recorded(batch.counts)
    assert same(
        recorded.sampler.sample(batch.logits, batch.plan), recorded.backend.sample(batch.logits, batch.plan)
    )
    assert recorded.sampler.num_replayed == 0


def test_tables_are_not_written_before_they_were_read():
    """The host does not wait for the device: it has two buffers, and waits before it uses one again."""
    batch = Batch([drawn(1)], VOCAB)
    recorded = Recorded(batch.counts)
    waited: list[int] = []
    number = iter(range(10))

    def upload(target: torch.Tensor, staged: torch.Tensor) -> Callable[[], None]:
        target.copy_(staged)
        mine = next(number)
        return lambda: waited.append(mine)

    recorded.device.upload = upload  # type: ignore[method-assign]
    for expected in ([], [], [0], [0, 1]):
        recorded.sample(batch)
        assert waited == expected


def test_logprobs_are_those_of_the_backend():
    batch = Batch([drawn(1), drawn(2)], VOCAB)
    recorded = Recorded(batch.counts)
    arguments: Any = (batch.logits, np.array([1]), torch.tensor([3, 4], device=DEVICE), 2)
    for ours, theirs in zip(
        recorded.sampler.logprobs(*arguments), recorded.backend.logprobs(*arguments), strict=True
    ):
        assert torch.equal(ours, theirs)
