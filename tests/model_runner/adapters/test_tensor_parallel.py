"""Adapters on several ranks: each has its part of A and B, and all give the result of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.tp_group import SINGLE_RANK
from engine.model_runner.load import load_model_runner
from engine.models.adapters.read_adapter import read_adapter
from engine.models.source import ModelSource
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.feasibility import Capacity
from tests.model_runner.conftest import Driver, SeeingExecutor, engine_config
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks

from ..structures.families import QWEN3_MOE
from .peft_adapters import ALL_LINEAR, PHI3_LINEAR, make_adapter

PROMPT = [5, 60, 33, 7, 71, 12]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model_type", ["llama", "phi3", "qwen3_moe"])
def test_ranks_together_compute_what_one_computes(make_tiny_model, tmp_path, model_type, size):
    sizes: dict[str, Any] = {"intermediate_size": 96, "vocab_size": 97, "num_key_value_heads": size}
    experts: dict[str, Any] = {}
    if model_type == "qwen3_moe":
        sizes |= QWEN3_MOE
        experts = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    tiny = make_tiny_model(model_type, **sizes)
    linear = PHI3_LINEAR if model_type == "phi3" else ALL_LINEAR[: 4 if experts else None]
    targets = [*linear, "embed_tokens", "lm_head"]
    adapter = make_adapter(tiny.reference, tmp_path / "adapter", target_modules=targets, **experts)
    targets += ["experts"] if experts else []
    spec = read_adapter(adapter.folder, "one", tiny.spec)

    def logits(group: ThreadGroup | None) -> torch.Tensor:
        capacity = Capacity(256, 128, 4, 8, tiny.spec.vocab_size)
        config = ModelConfig(dtype="float32", device="cpu", num_threads=1, model_impl="engine")
        runner = load_model_runner(
            engine_config(config),
            ModelSource("hf", str(tiny.folder), "test"),
            tiny.spec,
            capacity,
            Place(group or SINGLE_RANK, None),
            SlotSizes(2, 4, targets),
        )
        assert runner.adapters is not None
        runner.adapters.store.read(7, spec)
        driver = Driver(runner, capacity)
        seen = SeeingExecutor(driver)
        one, base = driver.start(PROMPT, adapter_slot=2), driver.start(PROMPT)
        driver.step([(one, 6), (base, 6)], adapter_loads=[(2, 7)])
        driver.step([(one, 1), (base, 1)])
        return torch.stack(seen.logits)

    expected = logits(None)
    wanted = adapter.logits(PROMPT)[-1]
    torch.testing.assert_close(expected[0, 0], wanted, atol=5e-5, rtol=5e-5)
    for found in on_ranks(size, logits):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)
