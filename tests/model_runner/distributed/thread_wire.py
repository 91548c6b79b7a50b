"""`ThreadWire`: the pipeline stages of a model as threads of one process, which pass tensors through queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

import msgspec
import torch
from torch import Tensor

from engine.launch.resolve.stages import Stage, stages_of
from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.staged_runner import StagedRunner, StageRank
from engine.model_runner.distributed.tp_group import SINGLE_RANK, TPGroup
from engine.model_runner.load import load_model_runner
from engine.model_runner.model_runner import ModelRunner
from engine.models.source import ModelSource
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.config.model_choice import Quantization
from engine.runtime.feasibility import Capacity
from engine.runtime.step_plan import LaunchStep, Runner
from engine.runtime.transport.message_base import Message
from tests.model_runner.conftest import TinyModel, engine_config
from tests.model_runner.distributed.thread_group import ThreadGroup

TIMEOUT_S: Final = 60.0


class Wires:
    """The queues between `count` stages of one rank each."""

    def __init__(self, count: int) -> None:
        self.states: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(count)]
        self.results: list[queue.Queue[bytes | BaseException]] = [queue.Queue() for _ in range(count)]


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
        return lambda: [self._result(results) for results in self._wires.results[1:]]

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 that there is no result."""
        self._wires.results[self.stage.index].put(error)

    def _result(self, results: queue.Queue[bytes | BaseException]) -> bytes:
        result = results.get(timeout=TIMEOUT_S)
        if isinstance(result, BaseException):
            raise result
        return result


class StageThreads:
    """All ranks of a model: rank 0 here, in `runner`, the others on threads. Close it.

    Attributes:
        runners, wires: of all ranks.
        launched: what was sent to the other ranks.
    """

    def __init__(
        self, runners: Sequence[ModelRunner], wires: Sequence[ThreadWire], groups: Sequence[TPGroup]
    ) -> None:
        """Take the parts of each rank."""
        self.runners, self.wires = runners, wires
        self.launched: list[LaunchStep] = []
        self.errors: list[BaseException] = []
        self._inboxes: list[queue.Queue[LaunchStep | None]] = [queue.Queue() for _ in runners[1:]]
        self._threads = [
            threading.Thread(target=self._run, args=(runner, wire, group, inbox), daemon=True)
            for runner, wire, group, inbox in zip(
                runners[1:], wires[1:], groups[1:], self._inboxes, strict=True
            )
        ]
        for thread in self._threads:
            thread.start()
        self.runner: Runner = runners[0]
        if wires[0].stage.count > 1:
            self.runner = StagedRunner(runners[0], self, wires[0], groups[0])

    def send(self, message: Message) -> None:
        """See `Sender`; encoded and decoded, as between processes."""
        assert isinstance(message, LaunchStep)
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

    def _run(
        self,
        runner: ModelRunner,
        wire: ThreadWire,
        group: TPGroup,
        inbox: queue.Queue[LaunchStep | None],
    ) -> None:
        rank = StageRank(runner, wire, group)
        try:
            while (message := inbox.get()) is not None:
                rank.launch(message).wait()
        except BaseException as error:
            self.errors.append(error)
            wire.fail(error)


def load_stages(
    tiny: TinyModel,
    parallel: ParallelConfig,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    capacity: Capacity | None = None,
    quantization: Quantization | None = None,
    **kernels: Any,
) -> StageThreads:
    """All ranks of a model on the CPU."""
    capacity = capacity or Capacity(256, 128, 4, 8, tiny.spec.vocab_size, num_stages=parallel.pp)
    config = engine_config(
        ModelConfig(dtype=dtype, device="cpu", num_threads=1, model_impl="engine", quantization=quantization),
        **kernels,
    )
    source = ModelSource("gguf" if tiny.folder.suffix == ".gguf" else "hf", str(tiny.folder), "test")
    stages, tp = stages_of(tiny.spec, parallel), parallel.tp
    connections = [Wires(parallel.pp) for _ in range(tp)]
    barriers = [threading.Barrier(tp, timeout=TIMEOUT_S) for _ in stages]
    boards = [[torch.empty(0)] * tp for _ in stages]
    wires = [ThreadWire(stages[rank // tp], connections[rank % tp]) for rank in range(parallel.num_ranks)]
    groups: list[TPGroup] = [SINGLE_RANK] * parallel.num_ranks
    if tp > 1:
        groups = [
            ThreadGroup(rank % tp, tp, barriers[rank // tp], boards[rank // tp])
            for rank in range(parallel.num_ranks)
        ]

    def load(rank: int) -> ModelRunner:
        place = Place(groups[rank], None, wires[rank] if parallel.pp > 1 else None)
        return load_model_runner(config, source, tiny.spec, capacity, place)

    with ThreadPoolExecutor(parallel.num_ranks if tp > 1 else 1) as pool:
        runners = list(pool.map(load, range(parallel.num_ranks)))
    return StageThreads(runners, wires, groups)
