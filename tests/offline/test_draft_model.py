"""A second model that drafts changes no token and no log-probability, and drafts the same in whatever life.

A draft depends on the drafter's keys, values and states of all tokens before it. So if it is the same after a prefix
hit, chunks, a retraction, a swap or wrong drafts, these were right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.drafting.drafter import Drafter
from engine.scheduler.speculation.runner_drafts import RunnerDrafts
from tests.model_runner.drafting.eagle3_files import write_head
from tests.scheduler.speculation.proposers import proposing

from .test_drafts import LIVES, run

Drafts = dict[tuple[Any, ...], list[int]]


@pytest.fixture(scope="module")
def deep_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with each layer twice: an EAGLE-3 head takes features of three layers."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("draft") / "deep"))
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        for layer in (0, 1):
            if f".layers.{layer}." in name:
                weights[name.replace(f".layers.{layer}.", f".layers.{layer + 2}.")] = weights[name].clone()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head over every second token."""
    return write_head(
        tmp_path_factory.mktemp("draft") / "head", 272, draft_ids=torch.arange(136) * 2 + 1, rope_theta=1e4
    )


@contextmanager
def recorded(found: Drafts, *, rounds: bool = False) -> Iterator[None]:
    """Collects the drafts of all requests, which the runner makes in each step; the same are made at the same place.

    `rounds`: of 50 drafts one may be another, because keys and values are rounded to 8 bits.
    """
    draft, num_drafted, others = Drafter.draft, 0, []

    def record(self: Drafter, asked: Any) -> Any:
        nonlocal num_drafted
        token_ids = draft(self, asked)
        last_ids = self._last_ids(asked)
        start = 0
        for row, position, count, last in zip(*map(list, asked[:3]), last_ids.tolist(), strict=True):
            state = self._parts.states[int(row)]
            prompt = state.input_ids[: state.prompt_len].tobytes()
            key = (prompt, state.sampling.seed, state.sampling.temperature, int(position), last)
            drafts = token_ids[start : start + count].tolist()
            start += count
            known = found.setdefault(key, drafts)
            num_drafted += 1
            if any(a != b for a, b in zip(known, drafts, strict=False)):
                others.append(key)
                assert len(others) <= (max(1, num_drafted / 50) if rounds else 0), key
            found[key] = max(known, drafts, key=len)
        return token_ids

    with (
        proposing(lambda _known: None, 1.0),
        mock.patch.object(Drafter, "draft", record),
        mock.patch.object(
            RunnerDrafts, "chances", lambda self, req, count: [0.9**n for n in range(1, count + 1)]
        ),
        mock.patch.object(RunnerDrafts, "limit", lambda self, reqs, counts, intervals: counts),
    ):
        yield


def check(folder: Path, method: str, drafter: Path, life: str, *, least: float) -> None:
    """Compare with the same life without drafts, and the drafts with those of a plain life.

    `least`: share of drafts that are right.
    """
    settings, drafting = LIVES[life], {"speculative": method, "speculative_model": drafter}
    tokens, logprobs, _, drafts = run(folder, **settings)
    assert drafts == (0, 0)
    drafted: Drafts = {}
    if life != "int8 KV":  # which rounds
        with recorded(drafted):
            run(folder, **drafting, chunked_prefill_size=64)
    num_known = len(drafted)
    with recorded(drafted, rounds=life == "int8 KV"):
        found, found_logprobs, _, (num_drafts, num_accepted) = run(folder, **drafting, **settings)
    assert found == tokens
    tolerance = 1e-2 if settings.get("kv_cache_dtype") == "int8" else 1e-4
    for ours, theirs in zip(found_logprobs, logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        for a, b in zip(ours or (), theirs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
    assert num_drafts > 100
    assert num_accepted >= least * num_drafts
    assert life == "int8 KV" or num_known > 20


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("life", LIVES)
def test_a_draft_model_that_is_the_model(tiny_model: Path, life: str) -> None:
    """Nearly all of its drafts are right, also sampled ones: they are drawn with the model's noise."""
    check(tiny_model, "draft", tiny_model, life, least=0.95)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("life", LIVES)
def test_another_draft_model(deep_model: Path, tiny_model: Path, life: str) -> None:
    check(deep_model, "draft", tiny_model, life, least=0.0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("life", LIVES)
def test_a_head(deep_model: Path, head: Path, life: str) -> None:
    check(deep_model, "eagle3", head, life, least=0.0)
