"""A model whose attention is Triton's: prompts in chunks and mixed batches give the tokens they should."""

from __future__ import annotations

import pytest
import torch

from engine.model_runner import assembly, load
from engine.model_runner.attention.triton_paged import TritonAttention
from engine.models.source import ModelSource
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.feasibility import Capacity
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.model_runner.conftest import Driver, engine_config
from tests.triton_interpreter import repair_interpreter

repair_interpreter()


@pytest.mark.slow
@pytest.mark.skipif(HAS_NVIDIA_DRIVER, reason="kernels are compiled here, and the model is on the CPU")
def test_a_model_makes_the_same_tokens(make_tiny_llama, monkeypatch):
    tiny = make_tiny_llama()
    monkeypatch.setattr(assembly, "select_backend", lambda *_args: TritonAttention)
    capacity = Capacity(64, 100, 4, 6, tiny.spec.vocab_size)
    runner = load.load_model_runner(
        engine_config(
            ModelConfig(dtype="float32", device="cpu", num_threads=torch.get_num_threads(), seed=1)
        ),
        ModelSource("hf", str(tiny.folder), "test"),
        tiny.spec,
        capacity,
    )
    for pool in (*runner.kv_pool.k, *runner.kv_pool.v):
        pool[4:].fill_(torch.nan)
    driver = Driver(runner, capacity)
    prompt, other = list(range(1, 22)), [5, 6, 7]
    req = driver.start(prompt)
    driver.step([(req, 13)])
    driver.step([(req, 8)])
    newcomer = driver.start(other)
    driver.step([(newcomer, 3), (req, 1)])
    driver.step([(newcomer, 1), (req, 1)])
    assert req.output == tiny.greedy(prompt, len(req.output))
    assert newcomer.output == tiny.greedy(other, len(newcomer.output))
    assert (len(req.output), len(newcomer.output)) == (3, 2)
