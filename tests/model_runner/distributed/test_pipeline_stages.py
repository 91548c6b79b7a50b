"""Pipeline stages against the whole model, in one process: the same bits in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.runtime.config.device_config import ParallelConfig
from tests.model_runner.conftest import Driver
from tests.model_runner.distributed.test_tensor_parallel import GREEDY, PROMPTS, SEEDED
from tests.model_runner.distributed.thread_wire import load_stages

LAYERS = {"num_hidden_layers": 4}


def generate(tiny: Any, params: Any, pp: int, pp_layers: str | None = None, **options: Any) -> list[list[int]]:
    if pp == 1:
        staged = load_stages(tiny, ParallelConfig(), **options)
        driver = Driver(staged.runners[0], staged.runners[0].capacity)
        return driver.generate(PROMPTS, params, num=8, chunk=7)
    staged = load_stages(tiny, ParallelConfig(pp=pp, pp_layers=pp_layers), **options)
    try:
        return Driver(staged.runner, staged.runners[0].capacity).generate(PROMPTS, params, num=8, chunk=7)
    finally:
        staged.close()


@pytest.mark.parametrize("pp", [2, 3])
def test_stages_say_what_the_whole_model_says(make_tiny_model, pp):
    tiny = make_tiny_model("llama", **LAYERS)
    for params in (GREEDY, SEEDED):
        assert generate(tiny, params, pp) == generate(tiny, params, 1)
