"""Rare samplers: llama.cpp's own figures, and that a row with one changes no other row and is the same in any batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.sampling.native_backend import NativeSamplerBackend, reasons_against_native_backend
from engine.model_runner.sampling.noise import coins, noise_keys
from engine.model_runner.sampling.rare_sampler import filtered
from engine.model_runner.sampling.sampler import Sampler
from engine.runtime.sampling_params import SamplingParams

from .sampling_rows import DEVICE, Batch, Row, random_row

RARE: dict[str, dict[str, Any]] = {
    "top_n_sigma": {"top_n_sigma": 0.7},
    "typical": {"typical_p": 0.6},
    "dynatemp": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    "last": {"temperature_last": True, "temperature": 1.7, "top_p": 0.8, "min_p": 0.05, "top_k": 9},
    "all": {
        "top_n_sigma": 1.5,
        "typical_p": 0.8,
        "dynatemp_range": 0.3,
        "xtc_probability": 0.5,
        "temperature_last": True,
        "repetition_penalty": 1.3,
        "min_new_tokens": 3,
    },
}


def probabilities(given: list[float], coin: float = 0.5, **options: Any) -> list[float]:
    logits = torch.tensor([given]).log()
    return filtered(logits, SamplingParams(**options), coin)[0].softmax(-1).tolist()


QUARTERS = [0.4, 0.3, 0.2, 0.1]


# tests/test-sampling.cpp of llama.cpp.
@pytest.mark.parametrize(
    ("given", "options", "kept"),
    [
        (QUARTERS, {"xtc_probability": 0.99, "xtc_threshold": 0.09}, [3]),
        (QUARTERS, {"xtc_probability": 0.99, "xtc_threshold": 0.19}, [2, 3]),
        (QUARTERS, {"xtc_probability": 0.99, "xtc_threshold": 0.29}, [1, 2, 3]),
        (QUARTERS, {"xtc_probability": 0.99, "xtc_threshold": 0.39}, [0, 1, 2, 3]),
        ([0.97, 0.01, 0.01, 0.01], {"typical_p": 0.5}, [0]),
        ([0.4, 0.2, 0.2, 0.2], {"typical_p": 0.5}, [1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_n_sigma": 1.0}, [2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_n_sigma": 0.0}, [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_n_sigma": 3.0}, [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"dynatemp_range": 0.0}, [0, 1, 2, 3]),
    ],
)
def test_figures_of_llama_cpp(given, options, kept):
    total = sum(given[n] for n in kept)
    expected = [given[n] / total if n in kept else 0.0 for n in range(len(given))]
    assert probabilities(given, **options) == pytest.approx(expected, abs=1e-6)


def test_the_coin_of_xtc_decides_whether_it_drops_tokens():
    options = {"xtc_probability": 0.3, "xtc_threshold": 0.09}
    assert probabilities(QUARTERS, coin=0.31, **options) == pytest.approx(QUARTERS)
    assert probabilities(QUARTERS, coin=0.29, **options) == pytest.approx([0, 0, 0, 1])
    keys = noise_keys(np.arange(4000, dtype=np.uint64), np.full(4000, 7))
    tosses = coins(keys)
    assert tosses.min() >= 0.0 and tosses.max() < 1.0
    assert (tosses <= 0.3).mean() == pytest.approx(0.3, abs=0.03)


def entropy_of(shares: list[float]) -> float:
    """Relative to the largest possible one."""
    return -sum(p * math.log(p) for p in shares) / math.log(len(shares))


def test_a_dynamic_temperature_goes_with_the_entropy():
    entropy = entropy_of(QUARTERS)
    temperature = 0.7 + (1.3 - 0.7) * entropy**2
    weights = [p ** (1 / temperature) for p in QUARTERS]
    found = probabilities(QUARTERS, dynatemp_range=0.3, dynatemp_exponent=2.0)
    assert found == pytest.approx([w / sum(weights) for w in weights], abs=1e-5)
    # A range above the temperature goes down to 0, not below it.
    weights = [p ** (1 / (1.5 * entropy_of(QUARTERS))) for p in QUARTERS]
    found = probabilities(QUARTERS, temperature=0.5, dynatemp_range=1.0)
    assert found == pytest.approx([w / sum(weights) for w in weights], abs=1e-5)
    # Of the two tokens that top_k leaves, if it is last.
    pair = [0.4 / 0.7, 0.3 / 0.7]
    entropy = -sum(p * math.log(p) for p in pair) / math.log(2)
    weights = [p ** (1 / (0.7 + 0.6 * entropy)) for p in pair]
    found = probabilities(QUARTERS, dynatemp_range=0.3, top_k=2, temperature_last=True)
    assert found == pytest.approx([w / sum(weights) for w in weights] + [0, 0], abs=1e-5)


def test_one_token_and_dropped_ones_count_for_no_filter():
    alone = probabilities(QUARTERS, top_k=1, top_n_sigma=9.0, dynatemp_range=0.3, temperature_last=True)
    assert alone == [1.0, 0.0, 0.0, 0.0]
    # Mean and deviation are those of the tokens that a mask has left.
    kept = filtered(torch.tensor([[1.0, 2.0, 4.0, -torch.inf]]), SamplingParams(top_n_sigma=1.65), 0.5)
    assert kept.isfinite().tolist() == [[False, True, True, False]]


def test_a_temperature_after_the_filters_changes_no_filter():
    kept = [p > 0 for p in probabilities(QUARTERS, temperature=9.0, min_p=0.6, temperature_last=True)]
    assert kept == [True, True, False, False]
    assert all(probabilities(QUARTERS, temperature=9.0, min_p=0.6))
    assert not SamplingParams(temperature_last=True, temperature=2.0).has_rare_sampler  # nothing to be before


def rows_with(options: dict[str, Any]) -> list[Row]:
    rng = np.random.default_rng(5)
    rows = [random_row(rng, 90) for _ in range(7)]
    for n in (1, 4, 5):
        rows[n].params = SamplingParams(seed=n, **options)
    return rows


def choose(rows: list[Row], native: bool = False) -> list[int]:
    batch = Batch(rows, 90)
    backend = NativeSamplerBackend(batch.counts) if native else None
    masks, plan = batch.plan.grammar, batch.plan
    if masks is not None:
        plan = replace(plan, grammar=None).with_masks(masks)
    return Sampler(batch.counts, backend).sample(batch.logits, plan).token_ids.tolist()


@pytest.mark.parametrize("name", RARE)
def test_other_rows_are_as_without_and_a_row_is_as_alone(name):
    rows = rows_with(RARE[name])
    together = choose(rows)
    for n, row in enumerate(rows):
        assert choose([row]) == [together[n]]
    if not reasons_against_native_backend(DEVICE):
        assert choose(rows, native=True) == together
    batch = Batch(rows, 90).plan
    assert batch.rare is not None and batch.rare.indices.tolist() == [1, 4, 5]
    for part in (batch.draw, batch.penalties):
        assert part is None or not {1, 4, 5} & set(part.indices.tolist())


def test_masks_of_grammars_reach_rows_with_rare_samplers():
    rows = rows_with(RARE["all"])
    for n, row in enumerate(rows):
        row.allowed = {7, 11} if n % 2 else None
    chosen = choose(rows)
    assert {chosen[1], chosen[5]} <= {7, 11}
    assert chosen == choose(rows)
    for n, row in enumerate(rows):
        assert choose([row]) == [chosen[n]]


def test_counts_of_a_row_with_penalties_have_its_own_token_only():
    rows = rows_with(RARE["all"])
    batch = Batch(rows, 90)
    token = Sampler(batch.counts).sample(batch.logits, batch.plan).token_ids.tolist()[4]
    slot = int(batch.counts.slots([4])[0])
    expected = np.bincount([*rows[4].output, token], minlength=90)
    assert batch.counts.in_output[slot].tolist() == expected.tolist()
