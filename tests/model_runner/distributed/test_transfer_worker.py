"""`ComputedSteps`: when the KV of a step may leave a rank; and the end of a worker that fails."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.model_runner.distributed.rank_loop import RankLoop
from engine.model_runner.distributed.transfer_worker import ComputedSteps, TransferWorker
from engine.runtime.step_plan import ForwardMode, LaunchStep, StepPlan


class FakeEvent:
    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


def test_on_the_cpu_a_launched_step_is_computed():
    steps = ComputedSteps(torch.device("cpu"))
    assert not steps.has(1)
    steps.launched(1)
    assert steps.has(1) and not steps.has(2)


def test_on_a_gpu_its_event_decides():
    events: list[FakeEvent] = []

    def record() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    steps = ComputedSteps(torch.device("cpu"), record)
    steps.launched(1)
    assert not steps.has(1)
    steps.launched(2)
    events[0].is_over = True
    assert steps.has(1) and not steps.has(2)
    for step_id in range(3, 30):
        steps.launched(step_id)
    assert not steps.has(2)  # its event is not kept: the oldest one that is decides
    events[-8].is_over = True
    assert steps.has(2)


class BrokenTarget:
    polls = True

    def target(self) -> bytes:
        raise RuntimeError("a bug")

    def progress(self) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def test_a_worker_that_fails_ends_the_loop_of_its_rank():
    memory: Any = type("Memory", (), {"tensors": ()})()
    worker = TransferWorker(
        f"ipc://{Path('/tmp') / secrets.token_hex(6)}",
        "rank 1",
        memory,
        writer=None,
        target=BrokenTarget(),
        computed=ComputedSteps(torch.device("cpu")),
    )
    worker._thread.join(30.0)
    inbox: Any = type("Inbox", (), {"poll": lambda self, timeout_s: []})()
    loop = RankLoop(cast(Any, None), inbox, cast(Any, None), cast(Any, None), overlap=False, transfer=worker)

    with pytest.raises(RuntimeError, match="a bug"):
        loop.step()
    worker.close()


def test_a_step_is_reported_after_its_launch():
    told: list[str] = []

    class Runner:
        def launch(self, plan: StepPlan) -> Any:
            told.append(f"launch {plan.step_id}")
            return type("Pending", (), {"wait": lambda self: None})()

    class Transfer:
        def launched(self, step_id: int) -> None:
            told.append(f"launched {step_id}")

        def check(self) -> None:
            pass

    message = LaunchStep(StepPlan(1, ForwardMode.IDLE))
    inbox: Any = type("Inbox", (), {"poll": lambda self, timeout_s: [message]})()
    loop = RankLoop(
        cast(Any, Runner()), inbox, cast(Any, None), cast(Any, None), overlap=True, transfer=Transfer()
    )
    loop.step()

    assert told == ["launch 1", "launched 1"]
