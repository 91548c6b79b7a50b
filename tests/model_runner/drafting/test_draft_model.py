"""A draft model that is the model: its keys and values must be those of the model, whatever a step was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs

from engine.launch.resolve.drafter import _memory
from engine.model_runner.batch_builder import BatchBuilder
from engine.model_runner.drafting.draft_model import DraftModel
from engine.model_runner.drafting.drafter import Drafter
from engine.model_runner.drafting.lag import Run
from engine.model_runner.load import load_model_runner
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RUNNER_DRAFT, GetMasks
from tests.model_runner.conftest import Driver, TinyModel, engine_config
from tests.model_runner.drafted_steps import drafted

from .drafters import check_two_ranks

TEXT = [5, 17, 40, 23, 8, 61, 33]


def with_draft_model(model: TinyModel, draft_model: TinyModel) -> tuple[EngineConfig, ModelSpec, Capacity]:
    """With one row, and pages of four tokens."""
    config = dataclasses.replace(
        engine_config(ModelConfig(dtype="float32", device="cpu", num_threads=1)),
        scheduler=SchedulerConfig(speculative="draft", speculative_model=str(draft_model.folder)),
    )
    spec = structs.replace(model.spec, drafter=_memory(config, draft_model.spec))
    return config, spec, Capacity(64, 64, 4, 1, spec.vocab_size, num_host_pages=8)


def make(model: TinyModel, draft_model: TinyModel) -> Driver:
    config, spec, capacity = with_draft_model(model, draft_model)
    source = ModelSource("hf", str(model.folder), "test")
    return Driver(load_model_runner(config, source, spec, capacity), capacity)


@pytest.fixture
def driver(make_tiny_llama: Callable[..., TinyModel]) -> Driver:
    """The model drafts for itself."""
    model = make_tiny_llama()
    return make(model, model)


@pytest.mark.parametrize(("part", "name"), [(BatchBuilder, "build"), (Drafter, "_sampled")])
def test_a_step_without_memory_leaves_nothing_to_the_next_request_of_its_row(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, part: type, name: str
) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("none is left")

    req = driver.start(TEXT)
    driver.step([(req, len(TEXT))])
    with monkeypatch.context() as patch:
        patch.setattr(part, name, no_memory)
        plan = drafted(driver, [(req, [RUNNER_DRAFT] * 3)])
        assert driver.runner.launch(plan).wait().out_of_memory == "none is left"
    driver.finish(req)
    again = driver.start([9, *TEXT[1:]])
    for count in (len(TEXT), 1, 1):
        driver.step([(again, count)])
    driver.finish(again, free=False)
    driver.step([])
    kept = driver.runner.kv_pool.k
    slots, half = driver.slots(again.pages, 0, 8), len(kept) // 2
    for own, drafters in zip(kept[:half], kept[half:], strict=True):
        torch.testing.assert_close(own[slots], drafters[slots])


def test_tokens_that_wait_are_computed_before_their_page_leaves(driver: Driver) -> None:
    """A request that is swapped out takes the draft model's keys of its last tokens with it."""
    req = driver.start(TEXT[:4])
    for count in (4, 1, 1):
        driver.step([(req, count)])
    driver.finish(req, free=False)
    driver.step([], swap_outs=[(req.pages[1], 3)])
    (pages,) = driver.runner.host_kv_pool.pages
    keys, _ = pages[3].chunk(2)  # of the layers of both models; then the values
    own, drafters = keys[:, :2].chunk(2)
    assert own.abs().min() > 0.0
    torch.testing.assert_close(own, drafters)


def test_tokens_that_wait_are_computed_before_a_running_request_shares_its_page(driver: Driver) -> None:
    """Its pages are offered to the prefix cache with a checkpoint of state layers."""
    req = driver.start(TEXT[:6])
    for count in (6, 1):
        driver.step([(req, count)])
    plan = structs.replace(driver.plan([(req, 1)]), state_saves=np.array([req.row, 8, 1], "i4").tobytes())
    driver.runner.launch(plan).wait()
    kept = driver.runner.kv_pool.k
    slots, half = driver.slots(req.pages, 0, 8), len(kept) // 2
    for own, drafters in zip(kept[:half], kept[half:], strict=True):
        assert own[slots].abs().sum(dim=(1, 2)).min() > 0.0
        torch.testing.assert_close(own[slots], drafters[slots])


def test_the_masks_get_the_drafts_before_they_are_asked(driver: Driver) -> None:
    calls: list[tuple[str, list[int]]] = []

    def note(name: str, token_ids: Any) -> None:
        calls.append((name, token_ids.tolist()))

    masks = SimpleNamespace(
        drafted=lambda draft_ids: note("drafted", np.frombuffer(draft_ids, dtype=np.int32)),
        before=lambda: note("before", np.empty(0)),
        after=lambda token_ids: note("after", token_ids),
    )
    req = driver.start(TEXT)
    driver.step([(req, len(TEXT))])
    plan = drafted(driver, [(req, [RUNNER_DRAFT] * 3)])
    driver.runner.launch(plan, masks=cast(GetMasks, masks)).wait()
    (first, drafts), second, (third, sampled) = calls
    assert (first, second, third) == ("drafted", ("before", []), "after")
    assert drafts == sampled[:3], "the model drafts for itself"


def test_a_row_that_leaves_without_memory_is_tried_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    req = driver.start(TEXT[:4])
    for count in (4, 1, 1):
        driver.step([(req, count)])
    computed, tries = DraftModel.compute, []

    def no_memory_once(self: DraftModel, run: Run, states: Any = None) -> None:
        tries.append(run.positions.tolist())
        if len(tries) == 1:
            raise torch.OutOfMemoryError("none is left")
        computed(self, run, states)

    monkeypatch.setattr(DraftModel, "compute", no_memory_once)
    driver.finish(req)
    driver.step([])
    assert tries == [[4, 5], [4, 5]]


def test_a_draft_model_with_fewer_tokens_reads_others_as_its_last(
    make_tiny_llama: Callable[..., TinyModel],
) -> None:
    """Files pad vocabularies differently; it never proposes what it does not know, also if a request wants it."""
    driver = make(make_tiny_llama(), make_tiny_llama(vocab_size=90, seed=1))
    assert isinstance(driver.runner.drafter, Drafter)
    made, drafts, keys = driver.runner.drafter.draft, list[Any](), []

    def noting(_: Drafter, asked: Any) -> Any:
        drafts.append(made(asked))
        return drafts[-1]

    wants = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64, logit_bias={95: 9.0})
    sampled, widths = driver.runner.sampler.sample, []

    def sample(logits: torch.Tensor, *args: Any) -> Any:
        widths.append(logits.shape[1])
        return sampled(logits, *args)

    driver.runner.drafter._parts = driver.runner.drafter._parts._replace(
        sampler=SimpleNamespace(sample=sample)
    )
    for last in (95, 89):
        req = driver.start([*TEXT, last], wants)
        driver.step([(req, len(TEXT) + 1)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Drafter, "draft", noting)
            result = driver.runner.launch(drafted(driver, [(req, [RUNNER_DRAFT] * 3)])).wait()
        assert not result.errors and drafts[-1].max() < 90
        driver.finish(req)
        keys.append(driver.runner.kv_pool.k[-1][driver.slots(req.pages, 0, 8)].clone())
    torch.testing.assert_close(*keys)
    assert set(widths) == {96}


@pytest.mark.slow
def test_two_ranks_make_the_drafts_of_one(make_tiny_llama: Callable[..., TinyModel]) -> None:
    """Each has the whole draft model, and a part of the model."""
    model = make_tiny_llama()
    config, spec, capacity = with_draft_model(model, make_tiny_llama(num_hidden_layers=1, seed=1))
    check_two_ranks(config, model.folder, spec, capacity)
