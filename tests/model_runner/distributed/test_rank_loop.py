"""What rank 0 sends and what the other ranks do with it, without processes and devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest

from engine.model_runner.distributed.rank_loop import RankLoop
from engine.model_runner.distributed.ranked_runner import RankedRunner
from engine.runtime.step_plan import (
    ForwardMode,
    GetMasks,
    GoOn,
    LaunchStep,
    RankInput,
    StepPlan,
    StepResult,
    no_masks,
    to_the_end,
)


class Journal:
    """Stands for runner, group, inbox and outbox, and writes down who does what."""

    def __init__(self, arrivals: list[list[int]] | None = None) -> None:
        self.events: list[str] = []
        self.waits: list[float] = []
        self.arrivals = arrivals or []
        self.waiting = False

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Any:
        self.events.append(f"launch {plan.step_id}")
        return PendingEntry(self, plan.step_id)

    def send(self, message: LaunchStep) -> None:
        self.events.append(f"send {message.plan.step_id}")

    def poll(self, timeout_s: float) -> list[LaunchStep]:
        self.waits.append(timeout_s)
        return [LaunchStep(plan(step_id)) for step_id in (self.arrivals.pop(0) if self.arrivals else [])]

    @contextmanager
    def wait_for_others(self) -> Iterator[None]:
        self.waiting = True
        yield
        self.waiting = False


class PendingEntry:
    def __init__(self, journal: Journal, step_id: int) -> None:
        self.journal, self.step_id = journal, step_id

    def wait(self) -> StepResult:
        assert self.journal.waiting  # so that heartbeats go on
        self.journal.events.append(f"wait {self.step_id}")
        return StepResult(self.step_id)


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, ForwardMode.IDLE)


def loop(journal: Any, *, overlap: bool) -> RankLoop:
    return RankLoop(journal, journal, cast(Any, None), journal, overlap=overlap)


def test_a_plan_is_sent_before_rank_0_launches_it():
    journal: Any = Journal()
    runner = RankedRunner(journal, journal, journal)

    result = runner.launch(plan(1)).wait()

    assert journal.events == ["send 1", "launch 1", "wait 1"]
    assert result == StepResult(1)


def test_a_plan_survives_the_way():
    message = LaunchStep(StepPlan(7, ForwardMode.MIXED, rows=b"\1\0\0\0", swap_ins=b"\2\0\0\0\3\0\0\0"))
    decoder: msgspec.msgpack.Decoder[RankInput] = msgspec.msgpack.Decoder(RankInput)

    assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_steps_run_in_order_and_one_at_a_time():
    journal = Journal([[1, 2], [3]])
    rank = loop(journal, overlap=False)

    rank.step()
    rank.step()

    assert journal.events == ["launch 1", "wait 1", "launch 2", "wait 2", "launch 3", "wait 3"]
    assert journal.waits == [0.5, 0.5]


def test_with_overlap_one_stays_under_way_and_is_settled_when_nothing_comes():
    journal = Journal([[1, 2], [3], []])
    rank = loop(journal, overlap=True)

    for _ in range(3):
        rank.step()

    assert journal.events == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]
    assert journal.waits == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("arrivals", [[2], [1, 3], [1, 1]])
def test_a_lost_plan_is_an_error_and_no_wrong_sum(arrivals):
    rank = loop(Journal([arrivals]), overlap=False)

    with pytest.raises(RuntimeError, match=r"step \d came after step \d: a plan was lost"):
        rank.step()
