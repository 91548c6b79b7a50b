"""Decodes of a model with state layers, recorded as on a GPU: states move as without, also beside padding."""

from __future__ import annotations

import pytest

from tests.model_runner.structures.families import FAMILIES
from tests.triton_interpreter import repair_interpreter

from .graphs.test_cuda_graph_executor import make
from .recording_device import RerunningDevice

repair_interpreter()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(  # 9 run as 10
    ("name", "num"),
    [("lfm2", 2), ("lfm2", 9), ("qwen3_5_text", 2), ("mamba2 experts, groups, rotary, biases", 2)],
)
def test_recorded_decodes_give_the_same_tokens(make_tiny_model, name, num):
    tiny = make_tiny_model(FAMILIES[name].model_type, **FAMILIES[name].options)
    device = RerunningDevice()
    driver = make(tiny, device)
    prompts = [[(7 * n + 5 * k) % 96 for k in range(3 + 2 * n)] for n in range(num)]

    outputs = driver.generate(prompts, num=5)

    assert device.num_replayed == 4
    assert outputs == [tiny.greedy(prompt, 5) for prompt in prompts]
    pool = driver.runner.executor.eager._state_pool
    assert not any(part[0].any() for slots in pool.layers for part in slots if part is not None)
