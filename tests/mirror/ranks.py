"""Ranks of one model, each a process with a mirror of its own: the operations of NCCL are those of gloo, queued.

    tokens, operations = run_ranks(steps, folder, tp=2)

Rank 0 drives, and sends plans to the others, which run the product's `RankLoop`. An operation runs when its rank waits
for the step, in the order in which it was queued. If ranks queue them in different orders they never meet, and fail
after the group's timeout.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from engine.launch.resolve.stages import stage_of
from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.pp_link import TorchWire
from engine.model_runner.distributed.rank_loop import RankLoop
from engine.model_runner.distributed.ranked_runner import RankedRunner
from engine.model_runner.distributed.stage_group import StageGroup
from engine.model_runner.distributed.staged_runner import StagedRunner, StageRank
from engine.model_runner.distributed.tp_group import Rendezvous, TorchGroup
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.step_plan import RankInput
from tests.model_runner.conftest import Driver

from .device_tensor import CUDA, DeviceTensor, host_of
from .mirror import Mirror, mirror_device
from .runners import LLAMA, load_driver

Steps = Callable[[Driver], list[list[int]]]
"""Drives some steps; a function of a module."""
Operation = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of an operation that ran on the device."""

_TIMEOUT_S: Final = 600.0
_NAMES: Final = (
    "all_reduce",
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "broadcast",
    "isend",
    "recv",
)


@dataclass(frozen=True)
class _Rank:
    """One rank, as its process gets it; `plans`: to or from rank 0."""

    rank: int
    parallel: ParallelConfig
    file: str
    steps: Steps
    plans: Connection
    answer: Connection

    def run(self) -> None:
        with mirror_device() as mirror, pytest.MonkeyPatch.context() as patch:
            ran = _queue_operations(mirror, patch)
            with mirror.loading():
                world, place = self._join()
            driver = load_driver(LLAMA, mirror, place=place)
            world.meet("loaded")
            ran.clear()
            tokens = self._drive(driver, place) if self.rank == 0 else self._follow(driver, place)
            mirror.streams.run_all()
            self.answer.send((tokens, ran))
            world.meet("end")
        dist.destroy_process_group()

    def _join(self) -> tuple[TorchGroup, Place]:
        world = TorchGroup(
            Rendezvous(
                rank=self.rank,
                size=self.parallel.num_ranks,
                device=CUDA,
                file=Path(self.file),
                step_timeout_s=_TIMEOUT_S,
                start_timeout_s=_TIMEOUT_S,
                sends_host_memory=self.parallel.pp > 1,
            )
        )
        if self.parallel.pp == 1:
            return world, Place(world, CUDA)
        stage = stage_of(LLAMA, self.parallel, self.rank)
        return world, Place(StageGroup(world, self.parallel.tp), CUDA, TorchWire(world, stage))

    def _drive(self, driver: Driver, place: Place) -> list[list[int]]:
        sender = _Sender(self.plans)
        if place.wire is None:
            driver.runner = RankedRunner(driver.runner, sender, place.group)
        else:
            driver.runner = StagedRunner(driver.runner, sender, place.wire, place.group)
        tokens = self.steps(driver)
        self.plans.send_bytes(b"")
        return tokens

    def _follow(self, driver: Driver, place: Place) -> list[list[int]]:
        inbox = _Inbox(self.plans)
        stage = None if place.wire is None else StageRank(driver.runner, place.wire, place.group)
        no_child = cast(Any, None)
        loop = RankLoop(driver.runner, cast(Any, inbox), no_child, place.group, overlap=True, stage=stage)
        while not inbox.has_ended:
            loop.step()
        loop.step()  # the last one in flight
        return []


class _Sender:
    def __init__(self, plans: Connection) -> None:
        self._plans = plans

    def send(self, message: Any) -> None:
        self._plans.send_bytes(msgspec.msgpack.encode(message))


class _Inbox:
    def __init__(self, plans: Connection) -> None:
        self._plans = plans
        self._decoder: Any = msgspec.msgpack.Decoder(RankInput)
        self.has_ended = False

    def poll(self, timeout_s: float) -> list[Any]:
        if self.has_ended or not self._plans.poll(timeout_s):
            return []
        data = self._plans.recv_bytes()
        self.has_ended = not data
        return [self._decoder.decode(data)] if data else []


def _queue_operations(mirror: Mirror, patch: pytest.MonkeyPatch) -> list[Operation]:
    """Take over torch.distributed; returns the list of the operations that have run on the device."""
    ran: list[Operation] = []
    sending: list[Any] = []

    def queued(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(each, DeviceTensor) for each in args):
                return original(*args, **kwargs)
            hosts = tree_map(host_of, args)

            def run() -> None:
                ran.append((name, tuple(hosts[0].shape), str(hosts[0].dtype)))
                sending.append(original(*hosts, **kwargs))

            mirror.streams.current.put(run)
            return _Queued()

        operation.__name__ = name
        return operation

    for name in _NAMES:
        patch.setattr(dist, name, queued(name))
    connect = dist.init_process_group

    def init_process_group(_backend: str, *, device_id: Any, **options: Any) -> None:
        assert device_id == CUDA
        connect("gloo", **options)

    patch.setattr(dist, "init_process_group", init_process_group)
    return ran


class _Queued:
    """As NCCL's: waiting makes the stream wait, in which everything is in order anyway."""

    def wait(self) -> None:
        pass


def _run(rank: _Rank) -> None:
    torch.set_num_threads(1)
    rank.run()


def run_ranks(
    steps: Steps, folder: Path, *, tp: int = 1, pp: int = 1
) -> tuple[list[list[int]], list[list[Operation]]]:
    """The tokens that rank 0 returns, and the operations of each rank on its device, in the order in which they ran."""
    context = multiprocessing.get_context("spawn")
    parallel = ParallelConfig(tp=tp, pp=pp)
    assert parallel.num_ranks == 2, "rank 0 has one connection"
    answers, processes = [], []
    for rank, plans in enumerate(context.Pipe()):
        ours, theirs = context.Pipe()
        mine = _Rank(rank, parallel, str(folder / "store"), steps, plans, theirs)
        processes.append(context.Process(target=_run, args=(mine,)))
        processes[-1].start()
        theirs.close()
        answers.append(ours)
    try:
        assert all(answer.poll(2 * _TIMEOUT_S) for answer in answers), "a rank has not answered"
        found = [answer.recv() for answer in answers]
        for process in processes:
            process.join(_TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return found[0][0], [ran for _, ran in found]
