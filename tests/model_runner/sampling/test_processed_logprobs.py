"""Processed log-probabilities: those of the distribution that a token is drawn from, by a formula in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.model_runner.sampling.native_backend import NativeSamplerBackend, reasons_against_native_backend
from engine.model_runner.sampling.rare_sampler import filtered as filtered_by_rare
from engine.model_runner.sampling.sampler import Sampled, Sampler
from engine.runtime.config.answer_config import AnswerConfig
from engine.runtime.sampling_params import SamplingParams

from .sampling_rows import KINDS, Batch, Row, filtered, peaked, random_row
from .sampling_rows import processed as changed_logits

VOCAB = 90
TOP_K = 5
CHOSEN = (3, 17, 40)


def asking(row: Row) -> Row:
    params = replace(row.params, logprobs=TOP_K, logprob_token_ids=CHOSEN)
    return dataclasses.replace(row, params=params)


def sampled(rows: list[Row], *, native: bool = False, processed: bool = True) -> Sampled:
    batch = Batch(rows, VOCAB, processed_logprobs=processed)
    backend = NativeSamplerBackend(batch.counts) if native else None
    return Sampler(batch.counts, backend).sample(batch.logits, batch.plan)


def log_softmax(x: Any) -> Any:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check_row(found: Sampled, n: int, idx: int, logits: Any) -> None:
    """Entry n of the log-probabilities, of row idx, against the logits whose softmax is meant."""
    assert found.logprobs is not None and found.chosen is not None
    expected = log_softmax(logits)
    token = int(found.token_ids[idx])
    assert expected[token] > -np.inf
    np.testing.assert_allclose(found.logprobs.token[n], expected[token], atol=1e-4)
    np.testing.assert_allclose(found.logprobs.top[n], np.sort(expected)[::-1][:TOP_K], atol=1e-4)
    np.testing.assert_allclose(found.logprobs.top[n], expected[found.logprobs.top_ids[n]], atol=1e-4)
    np.testing.assert_allclose(found.chosen[n], expected[list(CHOSEN)], atol=1e-4)


@pytest.mark.parametrize("native", [False, True])
def test_they_are_those_of_the_distribution_that_is_drawn_from(native):
    """Rows with any penalties, biases, masks and filters, beside rows that ask for none, in one batch."""
    if native and (reasons := reasons_against_native_backend(torch.device("cpu"))):
        pytest.skip(str(reasons))
    rng = np.random.default_rng(11)
    num_checked = 0
    for _ in range(12):
        rows = [random_row(rng, VOCAB) for _ in range(8)]
        asked = sorted(rng.choice(8, size=5, replace=False).tolist())
        for n in asked:
            rows[n] = asking(rows[n])
        found = sampled(rows, native=native)
        assert found.token_ids.tolist() == sampled(rows, native=native, processed=False).token_ids.tolist()
        for n, idx in enumerate(asked):
            logits = filtered(rows[idx])
            if logits is not None:
                check_row(found, n, idx, logits)
                num_checked += 1
    assert num_checked > 45


@pytest.mark.parametrize("kind", KINDS)
def test_raw_ones_are_the_models_own(kind):
    row = asking(Row(SamplingParams(seed=4, **KINDS[kind]), peaked(VOCAB, 3), output=[5, 5, 6]))
    check_row(sampled([row], processed=False), 0, 0, row.logits.numpy().astype(np.float64))


def test_a_token_that_may_not_come_has_none():
    row = Row(SamplingParams(seed=4, logprobs=TOP_K, top_k=4), peaked(VOCAB, 3), allowed={7, 8, 9})
    found = sampled([row]).logprobs
    assert found is not None
    assert set(found.top_ids[0, :3].tolist()) == {7, 8, 9}
    assert torch.isneginf(found.top[0, 3:]).all()
    assert found.top[0, :3].exp().sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"top_n_sigma": 1.2, "repetition_penalty": 1.3},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"temperature_last": True, "temperature": 1.7, "top_p": 0.8},
    ],
    ids=str,
)
def test_rare_samplers(options):
    """The rare sampler's own filter, whose figures `test_rare_sampler.py` has, after the changes to the logits."""
    rows = [random_row(np.random.default_rng(5), VOCAB) for _ in range(3)]
    rows[1] = asking(
        Row(SamplingParams(seed=4, **options), peaked(VOCAB, 3), output=[5, 6], allowed={*range(60)})
    )
    found = sampled(rows)
    plain = Batch([rows[1]], VOCAB, processed_logprobs=True).plan.logprobs
    assert plain is not None and plain.processed is not None
    own = filtered_by_rare(
        torch.from_numpy(changed_logits(rows[1]))[None], rows[1].params, plain.processed.coins[0]
    )
    check_row(found, 0, 1, own[0].numpy().astype(np.float64))


@pytest.mark.parametrize(
    ("mode", "processed"),
    [("raw", False), ("raw_logprobs", False), ("processed", True), ("processed_logprobs", True)],
)
def test_names_of_the_modes(mode, processed):
    assert AnswerConfig(logprobs_mode=mode).processed_logprobs is processed
