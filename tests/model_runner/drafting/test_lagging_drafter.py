"""A draft model that is the model: its keys and values must be those of the model, whatever a step was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.launch.resolve.drafter import _memory
from engine.model_runner.batch_builder import BatchBuilder
from engine.model_runner.drafting.lagging_drafter import LaggingDrafter
from engine.model_runner.load import load_model_runner
from engine.models.source import ModelSource
from engine.runtime.config.engine_config import ModelConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.step_plan import RUNNER_DRAFT
from tests.model_runner.conftest import Driver, TinyModel, engine_config
from tests.model_runner.drafted_steps import drafted

TEXT = [5, 17, 40, 23, 8, 61, 33]


@pytest.fixture
def driver(make_tiny_llama: Callable[..., TinyModel]) -> Driver:
    """With one row, and pages of four tokens."""
    model = make_tiny_llama()
    config = dataclasses.replace(
        engine_config(ModelConfig(dtype="float32", device="cpu", num_threads=1)),
        scheduler=SchedulerConfig(speculative="draft", speculative_model=str(model.folder)),
    )
    spec = structs.replace(model.spec, drafter=_memory(config, model.spec))
    capacity = Capacity(64, 64, 4, 1, spec.vocab_size)
    source = ModelSource("hf", str(model.folder), "test")
    return Driver(load_model_runner(config, source, spec, capacity), capacity)


@pytest.mark.parametrize(("part", "name"), [(BatchBuilder, "build"), (LaggingDrafter, "_sampled")])
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
    kept = driver.runner.kv_pool.k
    slots, half = driver.slots(again.pages, 0, 8), len(kept) // 2
    for own, drafters in zip(kept[:half], kept[half:], strict=True):
        torch.testing.assert_close(own[slots], drafters[slots])
