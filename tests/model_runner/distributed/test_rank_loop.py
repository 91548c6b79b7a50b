"""What rank 0 sends and what the other ranks do with it, without processes and devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
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
    assert journal.waits == [0.5, 0.5, 0.5]


class VirtualTime:
    """A rank beside an overlapping rank 0, on devices that begin a step when both ranks have launched it. In ms.

    Rank 0 plans and sends step n, launches it, then waits for step n-1 and settles it. The clock is the rank's own.
    """

    PLAN, LAUNCH, STEP, SETTLE = 0.15, 0.25, 3.0, 0.25

    def __init__(self) -> None:
        self.now = 0.0
        self.sent = [0.0, self.PLAN]
        self.ends = [0.0]
        self.num_received = 0

    def poll(self, timeout_s: float) -> list[LaunchStep]:
        arrival, until = self.sent[self.num_received + 1], self.now + 1000 * timeout_s
        if arrival > until:
            self.now = until
            return []
        self.now = max(self.now, arrival)
        self.num_received += 1
        return [LaunchStep(plan(self.num_received))]

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Any:
        self.now += self.LAUNCH
        rank_0_launched = self.sent[plan.step_id] + self.LAUNCH
        settled = max(rank_0_launched, self.ends[-1]) + (self.SETTLE if plan.step_id > 1 else 0.0)
        self.sent.append(settled + self.PLAN)
        self.ends.append(max(self.now, rank_0_launched, self.ends[-1]) + self.STEP)
        return VirtualStep(self, self.ends[-1])

    @contextmanager
    def wait_for_others(self) -> Iterator[None]:
        yield


class VirtualStep:
    def __init__(self, time: VirtualTime, end: float) -> None:
        self.time, self.end = time, end

    def wait(self) -> StepResult:
        self.time.now = max(self.time.now, self.end)
        return StepResult(0)


def test_with_overlap_the_devices_never_wait_for_the_launches_of_another_rank():
    time = VirtualTime()
    rank = loop(time, overlap=True)

    while time.num_received < 50:
        rank.step()

    took = [end - before for before, end in pairwise(time.ends)]
    assert took[1:] == pytest.approx([time.STEP] * 49)


def test_a_pipeline_stage_answers_before_it_waits_for_another_plan():
    """Rank 0 may need the answer to make the plan: the rank would wait for half a second, once per step."""

    class Stage:
        def launch(self, message: LaunchStep) -> Any:
            return journal.launch(message.plan)

    journal: Any = Journal([[1], [], [2], []])
    rank = RankLoop(journal, journal, cast(Any, None), journal, overlap=True, stage=cast(Any, Stage()))

    for _ in range(4):
        rank.step()

    assert journal.events == ["launch 1", "wait 1", "launch 2", "wait 2"]
    assert journal.waits == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("arrivals", [[2], [1, 3], [1, 1]])
def test_a_lost_plan_is_an_error_and_no_wrong_sum(arrivals):
    rank = loop(Journal([arrivals]), overlap=False)

    with pytest.raises(RuntimeError, match=r"step \d came after step \d: a plan was lost"):
        rank.step()
