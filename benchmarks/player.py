"""`Player`: plays the scheduler for one model runner, so that whole steps can be timed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from benchmarks.smollm2 import LAYERS, PAGE_SIZE, VOCAB, model_spec

if TYPE_CHECKING:
    from engine.model_runner.model_runner import ModelRunner
    from engine.runtime.step_plan import StepPlan

MAX_LEN: Final = 2048
MAX_REQUESTS: Final = 64


class Player:
    """Requests of random tokens, pages in sequence."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step_id = 0
        self.finished: list[int] = []

    def step(
        self, lens: Sequence[int], new: int, tokens: Sequence[Sequence[int]] | None, shared: int = 0
    ) -> None:
        """Compute the last `new` tokens of requests with these lengths; see `plan`."""
        self.runner.launch(self.plan(lens, new, tokens, shared)).wait()

    def plan(
        self, lens: Sequence[int], new: int, tokens: Sequence[Sequence[int]] | None, shared: int = 0
    ) -> StepPlan:
        """The plan of a step that computes the last `new` tokens of requests with these lengths, in rows 0, 1, ...

        Args:
            tokens: of each, if they start with this step.
            shared: tokens at the beginning that are in the pages of row 0.
        """
        import numpy as np

        from engine.runtime.sampling_params import SamplingParams
        from engine.runtime.step_plan import ForwardMode, NewReq, StepPlan

        def int32(values: Any) -> bytes:
            return np.asarray(values, dtype=np.int32).tobytes()

        def slots(row: int, start: int, stop: int) -> Any:
            at = np.arange(start, stop)
            return np.where(at < shared, at, row * MAX_LEN + at) + PAGE_SIZE

        self.step_id += 1
        sampling = SamplingParams(temperature=0.0, seed=0, max_new_tokens=MAX_LEN, ignore_eos=True)
        new_reqs = [
            NewReq(f"r{row}", row, int32(mine), len(mine), int32(slots(row, 0, len(mine) - new)), sampling)
            for row, mine in enumerate(tokens or ())
        ]
        plan = StepPlan(
            step_id=self.step_id,
            mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
            rows=int32(range(len(lens))),
            num_computed_tokens=int32([length - new for length in lens]),
            num_scheduled_tokens=int32([new] * len(lens)),
            out_cache_loc=int32(
                np.concatenate([slots(row, length - new, length) for row, length in enumerate(lens)])
            ),
            samples=bytes([1] * len(lens)),
            total_num_scheduled_tokens=new * len(lens),
            new_reqs=tuple(new_reqs),
            finished_rows=int32(self.finished),
        )
        self.finished = []
        return plan


def make_player(num_threads: int, recorded: bool = True) -> Player:
    """A runner with random weights; `recorded`: it records and replays steps if it can."""
    from engine.model_runner.load import load_model_runner
    from engine.models.source import ModelSource
    from engine.runtime.config.device_config import KernelConfig
    from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig
    from engine.runtime.feasibility import Capacity

    config = ModelConfig(dtype="bfloat16", device="cpu", num_threads=num_threads, load_format="dummy", seed=1)
    capacity = Capacity(MAX_LEN, MAX_REQUESTS * MAX_LEN // PAGE_SIZE, PAGE_SIZE, MAX_REQUESTS, VOCAB, 0)
    return Player(
        load_model_runner(
            EngineConfig(
                model=config,
                cache=CacheConfig(page_size=PAGE_SIZE),
                kernels=KernelConfig(record_steps="auto" if recorded else False),
            ),
            ModelSource("hf", "dummy", "benchmark"),
            model_spec(LAYERS),
            capacity,
        )
    )
