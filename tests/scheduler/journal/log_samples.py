"""A header and one record of each kind, for tests of the decision log's file."""

from __future__ import annotations

import os

import pytest

from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import AbortRequest, FinishKind, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode
from engine.scheduler.journal.log_file import Header, Idle, Input, LogRecord, Planning
from engine.scheduler.journal.log_writer import header_of
from engine.scheduler.records.decision_log import (
    Arrived,
    BudgetState,
    Finished,
    PageCounts,
    PassRecord,
    Retraction,
    Settled,
    StepTime,
)
from engine.scheduler.records.verdict import AddReqResult, CacheMiss, MissKind, Reason, Verdict


def sample_header() -> Header:
    capacity = Capacity(512, 64, 16, 8, 97)
    return header_of(EngineConfig(), capacity, frozenset({0, 2}), wall_s=1e9, now_s=50.0)


def sample_records() -> list[LogRecord]:
    return [
        Input(1.0, GenerateRequest("a", b"abcdefgh", SamplingParams(max_new_tokens=3, seed=1), tenant="t")),
        Arrived(1.0, "a", 2, 3, 5, "t", "g", True),
        Planning(1.5),
        PassRecord(
            1.5,
            7,
            ForwardMode.MIXED,
            num_waiting=3,
            budget_before=BudgetState(9, 8, 7, 6),
            budget_after=BudgetState(5, 4, 3, 2),
            verdicts=[Verdict("a", AddReqResult.CONTINUE, Reason.ADMITTED, 1, 2, 3, 4, 5)],
            num_rest=2,
            rest_reason=Reason.BEHIND,
            rest_behind="b",
            continued=[Verdict("c", AddReqResult.NO_TOKEN, Reason.NO_KV)],
            retractions=[Retraction("d", "swap", "memory", 3, 4)],
            cache_misses=[CacheMiss("a", 2, 1, MissKind.DIFFERS, 1)],
            pages=PageCounts(1, 2, 3, 4),
            policy="fcfs",
            notes=["a note"],
            plan_crc=4_000_000_000,
            step_time=StepTime(0.05, 0.01, 0.2, 0.04, 0.001, 0.0004),
        ),
        Settled(
            2.0, 7, 0.01, [Finished("a", FinishKind.ERROR, 1, "bad", 8, 5)], b"\1\0\0\0", {0: "bad"}, 0.5
        ),
        Input(3.0, AbortRequest("b", "gone")),
        Settled(3.0, 0, left=[Finished("b", FinishKind.ABORT, 0)], grammars=["c"]),
        Idle(4.0),
    ]


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all writes to files from now on."""
    sizes: list[int] = []
    write = os.write

    def counted(fd: int, data: bytes) -> int:
        sizes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counted)
    return sizes
