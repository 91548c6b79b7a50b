"""`EngineState`: the state of the model's replicas, and the calls that it permits.

A replica is a scheduler with its detokenizer; there is one without `--dp`. The server is healthy while one of them is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import astuple, replace

from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.feasibility import Capacity
from ..runtime.messages import PauseMode
from ..runtime.scheduler_report import (
    EncoderFigures,
    GrammarTotals,
    HistogramCounts,
    HostFigures,
    KVFigures,
    SchedulerReport,
    SchedulerTotals,
)
from ..runtime.transport.kv_tiers import TierFigures
from ..runtime.transport.kv_transfer import TransferFigures

R = TypeVar("R", KVFigures, HostFigures, EncoderFigures, SchedulerTotals, GrammarTotals, TierFigures)


class _Replica:
    """One of them. `report` is the latest one, also of a lost scheduler; None before the first."""

    def __init__(self, capacity: Capacity, started_s: float) -> None:
        self.capacity = capacity
        self.started_s = started_s
        self.report: SchedulerReport | None = None
        self.lost_reason: str | None = None


class EngineState:
    """The state of one engine's processes, which the manager writes; `lost` and `restarted` are called by `Recovery`.

    Attributes:
        draining: no new requests are accepted.
        report: the latest ones of all schedulers as one; None before the first.
        running: numbers of the replicas that run.
        num_replicas: how many there are, running or not.
        pause: the mode in which an admin has paused all schedulers, which those that restart are told again; None:
            they generate. A manager that restarts learns it from their reports.
    """

    def __init__(
        self,
        capacity: Capacity,
        watchdog_timeout_s: float,
        clock: Callable[[], float],
        num_replicas: int = 1,
    ) -> None:
        """Start with a running engine.

        Args:
            capacity: of each scheduler. Receiving it counts as the first heartbeat.
            watchdog_timeout_s: a scheduler without a report for longer than this is unhealthy.
            clock: CLOCK_MONOTONIC.
        """
        self.draining = False
        self.report: SchedulerReport | None = None
        self.running = list(range(num_replicas))
        self.num_replicas = num_replicas
        self.pause: PauseMode | None = None
        self._was_told = False  # whether to pause, in this life
        self._replicas = [_Replica(capacity, clock()) for _ in self.running]
        self._watchdog_timeout_s = watchdog_timeout_s
        self._clock = clock
        self._death: str | None = None  # not the error: raising one object twice keeps every traceback alive

    @property
    def capacity(self) -> Capacity:
        """The capacity of the smallest scheduler: a request that fits runs on any replica."""
        return min((each.capacity for each in self._replicas), key=lambda capacity: capacity.num_pages)

    @property
    def reports(self) -> list[SchedulerReport | None]:
        """The latest one of each scheduler; None before its first."""
        return [replica.report for replica in self._replicas]

    @property
    def is_dead(self) -> bool:
        """Whether the engine is lost for good."""
        return self._death is not None

    @property
    def is_transferring(self) -> bool:
        """Whether a prompt is on its way to another engine, or waits for its claim."""
        transfer = None if self.report is None or self.is_dead else self.report.transfer
        return transfer is not None and transfer.open + transfer.waiting > 0

    @property
    def lost_reason(self) -> str | None:
        """Reason why there is no scheduler or no detokenizer at present; None while one replica runs."""
        if self.running:
            return None
        return next(reason for each in self._replicas if (reason := each.lost_reason) is not None)

    def reported(self, report: SchedulerReport) -> None:
        """Take a scheduler's report."""
        self._replicas[report.replica].report = report
        known = [known for each in self._replicas if (known := each.report) is not None]
        running = [each for each in known if each.replica in self.running]
        lost = [_only_totals(each) for each in known if each.replica not in self.running]
        sent_s = min((each.sent_s for each in running), default=report.sent_s)
        self.report = combined([*running, *lost], sent_s)
        if not self._was_told:
            self.pause = PauseMode(self.report.paused) if self.report.paused else None

    def told(self, pause: PauseMode | None) -> None:
        """An admin pauses the schedulers, or lets them go on."""
        self.pause, self._was_told = pause, True

    def lost(self, replica: int, reason: str) -> None:
        """A replica's scheduler or detokenizer is lost; it will be restarted."""
        self._replicas[replica].lost_reason = reason
        self._count_running()

    def restarted(self, replica: int, capacity: Capacity) -> None:
        """A new scheduler runs; reports of the one before it are no heartbeat of this one."""
        state = self._replicas[replica]
        state.capacity, state.started_s, state.lost_reason = capacity, self._clock(), None
        self._count_running()

    def died(self, message: str) -> None:
        """The engine is lost for good, for the reason in `message`."""
        self._death = message

    def check_accepting(self) -> None:
        """Raise if new requests are refused. While processes restart they are accepted.

        Raises:
            EngineDeadError: the engine is dead.
            RequestError: the server is draining.
        """
        self._check_alive()
        if self.draining:
            raise RequestError(
                "the server is shutting down; retry elsewhere", code="shutting_down", status=503
            )

    def check_answering(self) -> None:
        """Raise if the scheduler cannot answer a call now.

        Raises:
            EngineDeadError: the engine is dead, or a process of it is being restarted.
        """
        self._check_alive()
        if self.lost_reason is not None:
            raise EngineDeadError(self.lost_reason)

    def unhealthy_reason(self) -> str | None:
        """Reason why a router should send requests elsewhere now; None for an engine with a healthy replica."""
        if self._death is not None:
            return self._death
        if self.draining:
            return "the server is shutting down"
        reasons = [self.reason_against(replica) for replica in range(self.num_replicas)]
        return None if None in reasons else reasons[0]

    def reason_against(self, replica: int) -> str | None:
        """Reason why a replica is not healthy; None if it is."""
        state = self._replicas[replica]
        if state.lost_reason is not None:
            return state.lost_reason
        report = state.report if state.report is not None and state.report.sent_s >= state.started_s else None
        age_s = self._clock() - (state.started_s if report is None else report.sent_s)
        if age_s > self._watchdog_timeout_s:
            return f"the scheduler's last heartbeat is {age_s:.1f} s old, the limit is {self._watchdog_timeout_s:g} s"
        if report is not None and report.stalled:
            return f"requests wait and nothing moves: {report.stalled}"
        return None

    def _count_running(self) -> None:
        self.running = [number for number, each in enumerate(self._replicas) if each.lost_reason is None]

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)


def _only_totals(report: SchedulerReport) -> SchedulerReport:
    """The report of a lost scheduler: what it did still counts, what it held does not."""
    return SchedulerReport(
        report.sent_s, totals=report.totals, grammar=report.grammar, replica=report.replica
    )


def combined(reports: Sequence[SchedulerReport], sent_s: float) -> SchedulerReport:
    """Sums of all counts, the largest estimate of memory, and the reasons of all.

    Args:
        reports: at least one; a single one stays as it is, but for its time.
        sent_s: time of the result.
    """
    if len(reports) == 1:
        return replace(reports[0], sent_s=sent_s)
    return SchedulerReport(
        sent_s=sent_s,
        num_running_reqs=sum(report.num_running_reqs for report in reports),
        num_queue_reqs=sum(report.num_queue_reqs for report in reports),
        num_swapped_reqs=sum(report.num_swapped_reqs for report in reports),
        num_background_queue_reqs=sum(report.num_background_queue_reqs for report in reports),
        num_background_running_reqs=sum(report.num_background_running_reqs for report in reports),
        num_grammar_reqs=sum(report.num_grammar_reqs for report in reports),
        num_queue_tokens=sum(report.num_queue_tokens for report in reports),
        new_token_ratio=max(report.new_token_ratio for report in reports),
        pinned_tokens=sum(report.pinned_tokens for report in reports),
        policy=", ".join(dict.fromkeys(report.policy for report in reports if report.policy)),
        waiting_by_reason=_sum_by_name(report.waiting_by_reason for report in reports),
        stalled=next((report.stalled for report in reports if report.stalled), ""),
        paused=next((report.paused for report in reports if report.paused), ""),
        detokenizer_reqs=sum(report.detokenizer_reqs for report in reports),
        num_adapters=max(report.num_adapters for report in reports),
        num_adapter_slots_used=sum(report.num_adapter_slots_used for report in reports),
        kv=_sum([report.kv for report in reports]),
        host=_sum([report.host for report in reports]),
        encoder=_sum([report.encoder for report in reports]),
        totals=_sum([report.totals for report in reports]),
        grammar=_sum([report.grammar for report in reports]),
        tiers={
            tier: _of_tier(tier, [report.tiers[tier] for report in reports if tier in report.tiers])
            for tier in sorted({tier for report in reports for tier in report.tiers})
        },
        num_sessions=sum(report.num_sessions for report in reports),
        session_turns=_sum_by_name(report.session_turns for report in reports),
        residency={
            name: _sum_histograms([report.residency[name] for report in reports if name in report.residency])
            for name in sorted({name for report in reports for name in report.residency})
        },
        drafts=_sum_by_name(report.drafts for report in reports),
        accepted_drafts=_sum_by_name(report.accepted_drafts for report in reports),
        transfer=_of_pair([report.transfer for report in reports if report.transfer is not None]),
    )


def _sum_by_name(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _sum(records: Sequence[R]) -> R:
    """A record with the sums of all fields."""
    columns = zip(*map(astuple, records), strict=True)
    return type(records[0])(*map(sum, columns))


def _sum_histograms(histograms: Sequence[HistogramCounts]) -> HistogramCounts:
    columns = zip(*(each.counts for each in histograms), strict=True)
    return HistogramCounts(tuple(map(sum, columns)), sum(each.sum_s for each in histograms))


def _of_tier(tier: str, figures: Sequence[TierFigures]) -> TierFigures:
    """Merge the figures of replicas, which share what a disk or a store holds; each has host memory of its own."""
    total = _sum(figures)
    return total if tier == "host" else replace(total, used_bytes=max(each.used_bytes for each in figures))


def _of_pair(figures: Sequence[TransferFigures]) -> TransferFigures | None:
    """Merge the figures of a prefill and a decode replica; a pair shares its bootstrap rooms."""
    if not figures:
        return None
    sent = max(figures, key=lambda each: each.sent_pages)
    received = max(figures, key=lambda each: each.received_pages)
    return replace(received, sent_pages=sent.sent_pages, held_pages=sum(each.held_pages for each in figures))
