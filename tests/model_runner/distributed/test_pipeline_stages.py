"""Pipeline stages against the whole model, in one process: the same bits in bfloat16."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.recording.native_executor import NativeExecutor
from engine.runtime.config.device_config import ParallelConfig
from tests.model_runner.conftest import Driver
from tests.model_runner.distributed.test_tensor_parallel import GREEDY, PROMPTS, SEEDED
from tests.model_runner.distributed.thread_wire import StageThreads, load_stages

RECORDABLE = {"num_hidden_layers": 4, "head_dim": 16, "hidden_size": 96, "intermediate_size": 96}


def generate(staged: StageThreads, params: Any) -> tuple[list[list[int]], list[Any]]:
    """What the prompts are continued with, in chunks and with log-probabilities; and all of the log-probabilities."""
    runner = staged.runner if len(staged.runners) > 1 else staged.runners[0]
    driver = Driver(runner, staged.runners[0].capacity)
    logprobs = []

    def step(*args: Any, **options: Any) -> Any:
        result = Driver.step(driver, *args, **options)
        logprobs.append((result.logprobs, result.prompt_logprobs))
        return result

    driver.step = step  # type: ignore[method-assign]
    try:
        return driver.generate(PROMPTS, params, num=8, chunk=7), logprobs
    finally:
        staged.close()


@pytest.mark.parametrize("pp", [2, 3])
def test_recorded_stages_say_what_the_whole_model_says(make_tiny_model, pp):
    tiny = make_tiny_model("llama", dtype="bfloat16", **RECORDABLE)
    for params in (GREEDY, SEEDED):
        wanted = [msgspec.structs.replace(params, logprobs=3, prompt_logprobs=2)] * 3
        staged = load_stages(tiny, ParallelConfig(pp=pp))
        assert generate(staged, wanted) == generate(load_stages(tiny, ParallelConfig()), wanted)
        if not reasons_against_library():
            assert all(isinstance(runner.executor, NativeExecutor) for runner in staged.runners)
            assert all(runner.executor.num_replayed for runner in staged.runners)
