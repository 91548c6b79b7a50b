"""The product's runner on a mirror or on the CPU, and drivers of it; what one computes is compared with the other.

Weights are large, so that each token depends on all before it: with those of `--load-format dummy` most faults would
change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import _disable_current_modes

from engine.model_runner import load
from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.model_runner.distributed.join_group import ALONE, Place
from engine.model_runner.load import load_model_runner
from engine.model_runner.trial import measure
from engine.model_runner.weights import dummy
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import GetMasks, StepResult, no_masks
from tests.model_runner.conftest import GREEDY, Driver, Request

from .mirror import Mirror

LLAMA = ModelSpec(
    model_type="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    torch_dtype="float32",
    eos_token_ids=(2,),
)
PROMPT = [(7 * n * n + 3 * n) % 96 for n in range(40)]
_BOUND, _SEED = 0.6, 9  # of the weights; with these the answers of `LLAMA` are not repetitive
ROWS = 6


def load_driver(
    spec: ModelSpec,
    mirror: Mirror | None,
    *,
    record: bool = True,
    max_recorded_bs: int = 2,
    chunk: int = 40,
    num_host_pages: int = 0,
    dtype: Any = "float32",
    adapter_slots: SlotSizes | None = None,
    num_checkpoints: int = 0,
    bound: float = _BOUND,
    seed: int = _SEED,
    speculative: Any = "off",
    place: Place = ALONE,
    measured: dict[bool, Any] | None = None,
    **kernels: Any,
) -> Driver:
    """A driver of a runner with random weights, on a mirror or (None) on the CPU without recordings.

    Args:
        record: whether steps are recorded.
        chunk: most prompt tokens of a step. The trial at start computes that many.
        place: of a rank among others, see `ranks.py`.
        measured: by `record`, results of the trial at start, which are kept here: with them there is no other trial.
            Only for loads that are equal but for `record`.
        kernels: fields of `KernelConfig`.
    """
    capacity = Capacity(
        128, 64, 4, ROWS, spec.vocab_size, num_host_pages, num_checkpoints=num_checkpoints, checkpoint_pages=4
    )
    model = ModelConfig(
        dtype=dtype,
        device="cpu" if mirror is None else "cuda",
        num_threads=1,
        load_format="dummy",
        seed=seed,
        max_model_len=128,
    )
    recorded = {"record_steps": record and mirror is not None, "max_recorded_bs": max_recorded_bs}
    config = EngineConfig(
        model=model,
        cache=CacheConfig(page_size=4, mem_fraction=0.5),
        kernels=KernelConfig(**{**recorded, **kernels}),
        scheduler=SchedulerConfig(
            chunked_prefill_size=chunk, max_running_requests=ROWS, speculative=speculative
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dummy, "_BOUND", bound)
        patch.setattr(load, "collapse_resident_memory", lambda: 0)
        if measured is not None:
            if record not in measured:
                trial = measure
                patch.setattr(
                    load, "measure", lambda *parts, **more: measured.setdefault(record, trial(*parts, **more))
                )
            else:
                patch.setattr(load, "measure", lambda *_, **__: measured[record])
        with _disable_current_modes() if mirror is None else mirror.loading():
            source = ModelSource("hf", "dummy", "test")
            runner = load_model_runner(config, source, spec, capacity, place, adapter_slots)
    return Driver(runner, capacity)


class Ahead:
    """Drives a runner as a scheduler that overlaps: up to three steps are in flight.

    Attributes:
        masks: of all steps.
        num_ahead: steps that are launched before the oldest one is waited for. With 1, as in a server, and a mirror
            a launch that waits for the step before is a fault.
    """

    def __init__(self, driver: Driver, num_ahead: int = 2, mirror: Mirror | None = None) -> None:
        self.driver = driver
        self.num_ahead = num_ahead
        self._launching = mirror.faults.launching if mirror is not None and num_ahead == 1 else nullcontext
        self.masks: GetMasks = no_masks
        self.results: list[StepResult] = []
        self._in_flight: list[tuple[Any, list[tuple[Request, int]]]] = []

    def start(self, tokens: Sequence[int], sampling: SamplingParams = GREEDY, **options: Any) -> Request:
        return self.driver.start(tokens, sampling, **options)

    def go(self, work: Sequence[tuple[Request, int]], **options: Any) -> None:
        """Launch a step that computes so many more tokens of each request; extends must come first."""
        plan = self.driver.plan(work, **options)
        with self._launching():
            pending = self.driver.runner.launch(plan, masks=self.masks)
        sampling = []
        for req, count in work:
            req.computed += count
            if req.computed == len(req.tokens) and req.pooling is None:
                sampling.append((req, len(req.tokens)))
                req.tokens.append(-1)  # not known yet
        self._in_flight.append((pending, sampling))
        while len(self._in_flight) > self.num_ahead:
            self._settle()

    def prompt(self, req: Request) -> None:
        """The rest of its prompt in one step."""
        self.go([(req, len(req.tokens) - req.computed)])

    def decode(self, *reqs: Request, num: int = 1) -> None:
        for _ in range(num):
            self.go([(req, 1) for req in reqs])

    def settle(self) -> None:
        """Wait for all steps."""
        while self._in_flight:
            self._settle()

    def finish(self, *reqs: Request) -> list[list[int]]:
        """Settle and end requests; their outputs."""
        self.settle()
        for req in reqs:
            self.driver.finish(req)
        return [req.output for req in reqs]

    def _settle(self) -> None:
        pending, sampling = self._in_flight.pop(0)
        result: StepResult = pending.wait()
        assert not result.errors, result.errors
        assert not result.out_of_memory, result.out_of_memory
        tokens = np.frombuffer(result.next_token_ids, dtype=np.int32).tolist()
        for (req, place), token in zip(sampling, tokens, strict=True):
            req.tokens[place] = token
        self.results.append(result)


def on_cpu() -> Any:
    """A block with the operators of the CPU, within the block of a mirror."""
    return _disable_current_modes()
