"""`Plan`: the measurements of a run, their order, and their expected duration.

First every side alone, for the time to its first completion and its memory; then all of them up, with requests to one
at a time, interleaved. A pair without a target is measured in the first round only: llama.cpp takes minutes for work
that takes the others seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.peers.results import MEMORY, START, Results
from benchmarks.peers.sides import Side
from benchmarks.peers.workloads import Workload, is_compared

MAX_STARTS: Final = 3
_ENOUGH_STARTING_S: Final = 60.0
_UNKNOWN_S: Final = 60.0
_QUICK_SHARE: Final = 0.2
_CLIENT_S: Final = 2.0  # to start a client, which no figure contains


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement."""

    side: Side
    workload: Workload
    round: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run.

    Attributes:
        all_rounds: measure also those pairs in every round that no target compares.
        quick: small workloads, each measured once.
    """

    sides: Sequence[Side]
    workloads: Sequence[Workload]
    rounds: int
    all_rounds: bool = False
    quick: bool = False

    def jobs(self, results: Results) -> Iterator[Job]:
        """The missing measurements, in order. Each round begins with another side, so that none is always first."""
        for round_idx in range(self.rounds):
            for workload in self.workloads:
                turn = round_idx % len(self.sides)
                for side in (*self.sides[turn:], *self.sides[:turn]):
                    wanted = round_idx == 0 or self.all_rounds or is_compared(side.name, workload.name)
                    if wanted and not results.has(side.name, workload.name, round_idx):
                        yield Job(side, workload, round_idx)

    def missing_starts(self, side: Side, results: Results) -> int:
        """Starts still to be measured: several, unless they take long."""
        values = results.values(side.name, START, "").values()
        spent_s = sum(values)
        expected_s = side.expected_s.get(START, _UNKNOWN_S) if not values else spent_s / len(values)
        wanted = max(1, min(MAX_STARTS, int(_ENOUGH_STARTING_S // max(expected_s, 0.1))))
        if self.quick:
            wanted = 1
        return max(0, wanted - len(values))

    def needs_memory(self, side: Side, results: Results) -> bool:
        """Whether its memory is still to be measured."""
        return not results.values(side.name, MEMORY, "")

    def expected_s(self, job: Job, results: Results) -> float:
        """Expected seconds of one measurement: the last measured time, or the estimate of the side."""
        known = results.last_wall_s(job.side.name, job.workload.name)
        if known is not None:
            return known
        expected_s = job.side.expected_s.get(job.workload.name, _UNKNOWN_S)
        return expected_s * (_QUICK_SHARE if self.quick else 1.0) + _CLIENT_S

    def alone_s(self, results: Results) -> float:
        """Expected seconds of all missing starts and fillings."""
        total = 0.0
        for side in self.sides:
            start_s = side.expected_s.get(START, _UNKNOWN_S)
            total += self.missing_starts(side, results) * start_s
            if self.needs_memory(side, results):
                total += 0.0 if self.quick else side.expected_s.get("fill", _UNKNOWN_S)
        return total

    def rounds_s(self, results: Results) -> float:
        """Expected seconds of all missing measurements, with the start of all servers."""
        jobs = list(self.jobs(results))
        starting = {job.side.name: job.side.expected_s.get(START, _UNKNOWN_S) for job in jobs}
        return sum(starting.values()) + sum(self.expected_s(job, results) for job in jobs)
