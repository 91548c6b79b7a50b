"""`ThreadWire`: the pipeline stages of a model as threads of one process, which pass tensors through queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec
from torch import Tensor

from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.staged_runner import StagedRunner, StageRank
from engine.model_runner.distributed.tp_group import SINGLE_RANK
from engine.model_runner.load import load_model_runner
from engine.model_runner.model_runner import ModelRunner
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.model_files.quantization import Quantization
from engine.runtime.model_files.source import ModelSource
from engine.runtime.resolve.stages import Stage, stages_of
from engine.runtime.step_plan import LaunchStep
from tests.model_runner.conftest import TinyModel, engine_config

TIMEOUT_S: Final = 60.0


class Wires:
    """The queues between `count` stages of one rank each."""

    def __init__(self, count: int) -> None:
        self.states: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(count)]
        self.results: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(count)]


class ThreadWire:
    """A `StageWire`. `shapes` are those of what was sent on."""

    waited_s = 0.0

    def __init__(self, stage: Stage, wires: Wires) -> None:
        self.stage = stage
        self._wires = wires
        self.shapes: list[tuple[int, ...]] = []

    def send(self, states: Tensor) -> None:
        self.shapes.append(tuple(states.shape))
        self._wires.states[self.stage.index + 1].put(states)

    def receive(self, out: Tensor) -> None:
        out.copy_(self._wires.states[self.stage.index].get(timeout=TIMEOUT_S))

    def send_result(self, result: bytes) -> None:
        self._wires.results[self.stage.index].put(result)

    def expect_results(self) -> Callable[[], list[bytes]]:
        return lambda: [results.get(timeout=TIMEOUT_S) for results in self._wires.results[1:]]


class StageThreads:
    """All stages of a model: the first one here, behind `runner`, the others on threads. Close it."""

    def __init__(
        self, runners: Sequence[ModelRunner], wires: Sequence[ThreadWire]
    ) -> None:
        """Take the runner and the wire of each stage."""
        self.runners, self.wires = runners, wires
        self.launched: list[LaunchStep] = []
        self.errors: list[BaseException] = []
        self._inboxes: list[queue.Queue[LaunchStep | None]] = [queue.Queue() for _ in runners[1:]]
        self._threads = [
            threading.Thread(target=self._run, args=(StageRank(runner, wire, SINGLE_RANK), inbox), daemon=True)
            for runner, wire, inbox in zip(runners[1:], wires[1:], self._inboxes, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self.runner = StagedRunner(runners[0], self, wires[0])

    def send(self, message: LaunchStep) -> None:
        """See `Sender`; encoded and decoded, as between processes."""
        self.launched.append(message)
        for inbox in self._inboxes:
            inbox.put(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=LaunchStep))

    def close(self) -> None:
        """End the threads."""
        for inbox, thread in zip(self._inboxes, self._threads, strict=True):
            inbox.put(None)
            thread.join(TIMEOUT_S)
        if self.errors:
            raise self.errors[0]

    def _run(self, rank: StageRank, inbox: queue.Queue[LaunchStep | None]) -> None:
        try:
            while (message := inbox.get()) is not None:
                rank.launch(message).wait()
        except BaseException as error:
            self.errors.append(error)


def load_stages(
    tiny: TinyModel,
    parallel: ParallelConfig,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    capacity: Capacity | None = None,
    kernels: dict[str, Any] | None = None,
    quantization: Quantization | None = None,
    kind: Literal["hf", "gguf"] = "hf",
) -> StageThreads:
    """The stages of a model on the CPU."""
    capacity = capacity or Capacity(256, 128, 4, 8, tiny.spec.vocab_size, num_stages=parallel.pp)
    config = ModelConfig(
        dtype=dtype,
        device="cpu",
        num_threads=1,
        load_format="auto",
        model_impl="engine",
        quantization=quantization,
    )
    source = ModelSource(kind, str(tiny.folder), "test")
    wires = Wires(parallel.pp)
    runners, ends = [], []
    for stage in stages_of(tiny.spec, parallel):
        ends.append(ThreadWire(stage, wires))
        place = Place(SINGLE_RANK, None, ends[-1])
        settings = engine_config(config, **(kernels or {}))
        runners.append(load_model_runner(settings, source, tiny.spec, capacity, place))
    return StageThreads(runners, ends)
