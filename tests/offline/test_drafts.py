"""Drafts of every source change no token and no log-probability, whatever else happens to a request."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from engine import LLM, SamplingParams
from engine.scheduler.speculation.ngram_proposer import NgramProposer
from tests.model_runner.drafting.drafters import drafting
from tests.scheduler.speculation.proposers import RIGHT, free_drafts, proposing

from .test_state_layers import tiny_lfm2

__all__ = ["tiny_lfm2"]  # a fixture

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "page_size": 4,
    "max_total_tokens": 2048,
    "max_running_requests": 6,
}
BEGINNING = "one beginning that all of these prompts share, and then a b c a b c a b c a b "
PROMPTS = [BEGINNING + "c a b " * n for n in range(4)]
WORK = [
    SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=3, max_new_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_new_tokens=37, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.8, seed=5, max_new_tokens=40, ignore_eos=True, repetition_penalty=1.1),
]
RARE: list[SamplingParams] = [
    SamplingParams(seed=3, max_new_tokens=40, ignore_eos=True, top_n_sigma=2.0, xtc_probability=0.5),
    SamplingParams(seed=4, max_new_tokens=40, ignore_eos=True, typical_p=0.8, dynatemp_range=0.5),
    SamplingParams(seed=5, max_new_tokens=37, ignore_eos=True, min_p=0.05, temperature_last=True, logprobs=1),
    SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, dry_multiplier=2.0),
]
LIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunked_prefill_size": 8},
    "no cache": {"radix_cache": False},
    "retraction": {"chaos": "retract=0.2:12", "preemption_mode": "recompute"},
    "swap": {"chaos": "retract=0.2:12", "preemption_mode": "swap", "swap_space": 0.01},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "bursts": {"multi_step_ms": 1000.0},
    "overlap": {"overlap": True},
    "processed logprobs": {"logprobs_mode": "processed"},
}
RUNNER = {"runner's oracle": True, "runner's adversary": False}
"""Drafters of the runner: whether they are right."""


def run(folder: Path, **settings: Any) -> Any:
    """Tokens and log-probabilities of the prompts, twice: the second time they, and the answers, are known.

    Then the tokens of two answers to one prompt, and of one that ends at a stop token; and the figures of drafts.
    """
    with LLM(str(folder), **SETTINGS | settings) as llm:
        outputs = [*llm.generate(PROMPTS, WORK), *llm.generate(PROMPTS, WORK)]
        outputs += llm.sample(PROMPTS[1], 2, WORK[1])
        first = outputs[1].token_ids
        stop = next(token for n, token in enumerate(first) if n > 9 and token not in first[:n])
        outputs += llm.generate([PROMPTS[1]], replace(WORK[1], stop_token_ids=(stop,)))
        assert outputs[-1].token_ids == first[: first.index(stop) + 1]
        texts = [
            [*llm.tokenizer.encode(prompt), *each.token_ids]
            for prompt, each in zip(PROMPTS, outputs[:4], strict=True)
        ]
        drafts = (
            sum(each.usage.draft_tokens for each in outputs),
            sum(each.usage.accepted_draft_tokens for each in outputs),
        )
    return [each.token_ids for each in outputs], [each.logprobs for each in outputs], texts, drafts


def check(folder: Path, source: str, **settings: Any) -> None:
    """Compare with the same life without drafts."""
    tokens, logprobs, texts, drafts = run(folder, **settings)
    assert drafts == (0, 0)

    def next_token(known: Sequence[int]) -> int | None:
        """The next token of the first text that begins so."""
        begun = (text for text in texts if text[: len(known)] == known and len(text) > len(known))
        return next((text[len(known)] for text in begun), None)

    method, drafters = "suffix" if source == "suffix" else "ngram", []
    with contextlib.ExitStack() as stack:
        stack.enter_context(proposing(next_token, RIGHT[source]) if source in RIGHT else free_drafts())
        if source == "mtp" or source in RUNNER:
            stack.enter_context(mock.patch.object(NgramProposer, "chances", return_value=[]))
            method = "mtp"
        if source in RUNNER:
            drafters = stack.enter_context(drafting(next_token, right=RUNNER[source]))
        found, found_logprobs, _, (num_drafts, num_accepted) = run(folder, speculative=method, **settings)
    num_known = drafters[0].num_known if drafters else num_drafts
    assert found == tokens
    # A sum in another order may round a value of int8 KV to the next integer, as chunks do.
    tolerance = 1e-2 if settings.get("kv_cache_dtype") == "int8" else 1e-4
    for ours, theirs in zip(found_logprobs, logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        for a, b in zip(ours or (), theirs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
    assert num_drafts > 0
    if source.endswith("adversary"):
        assert num_accepted == 0
    elif source.endswith("oracle"):
        assert num_accepted > 0.9 * num_known  # two answers to one prompt may begin with the same token
    else:
        assert int(source != "mtp") <= num_accepted <= num_drafts  # a random layer is hardly ever right


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("source", ["ngram", "suffix", *RIGHT, *RUNNER])
@pytest.mark.parametrize("life", LIVES)
def test_answers_are_those_without(tiny_model, source, life):
    check(tiny_model, source, **LIVES[life])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("source", ["oracle", "suffix", *RUNNER])
@pytest.mark.parametrize("life", LIVES)
def test_rare_samplers_too(tiny_model, source, life, monkeypatch):
    monkeypatch.setattr(f"{__name__}.WORK", RARE)
    check(tiny_model, source, **LIVES[life])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["suffix", *RIGHT, *RUNNER])
def test_state_layers_too(tiny_lfm2, source):
    check(tiny_lfm2, source)
