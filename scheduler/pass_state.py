"""`PassState`: the state of one pass of `Scheduler.next_batch`; `record_of` turns it into a `PassRecord` for the log.

Each part of a pass (decodes, admission, retraction) writes its decisions into the state. Later parts of the same pass
read them there. No part reads a `PassRecord`, so what the decision log keeps or drops changes no decision.

    next_batch ──► PassState ──► Decodes, Admission, Preemption ... ──► record_of ──► PassRecord ──► DecisionLog
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from .batch import ScheduleBatch
from .records.decision_log import BudgetState, MatcherDrafts, PageCounts, PassRecord, Retraction, StepTime
from .records.verdict import CacheMiss, Reason, Verdict


class PassState(msgspec.Struct):
    """The decisions of one pass so far. `PassRecord` describes the attributes that are not listed here.

    A msgspec struct, because every pass makes one and a msgspec struct is constructed faster than a dataclass.

    Attributes:
        now_s: the time of the pass.
        policy: name of the policy at the beginning of the pass.
        num_waiting, num_grammar: requests in the queue when admission began, and those of them without their grammar.
        verdicts, continued: verdicts about waiting requests, and about partial prefills.
        num_rest, rest_reason, rest_behind: the shared verdict of the other waiting requests; see `refuse_rest`.
        retractions: requests that were retracted, including those of a step that failed since the last pass.
        gave_memory_back: whether a running request gave back its row and pages, so that another pass may admit more.
    """

    now_s: float
    policy: str = ""
    num_waiting: int = 0
    num_grammar: int = 0
    verdicts: list[Verdict] = msgspec.field(default_factory=list)
    continued: list[Verdict] = msgspec.field(default_factory=list)
    num_rest: int = 0
    rest_reason: Reason | None = None
    rest_behind: str = ""
    retractions: list[Retraction] = msgspec.field(default_factory=list)
    gave_memory_back: bool = False
    budget_before: BudgetState | None = None
    budget_after: BudgetState | None = None
    step_time: StepTime | None = None
    cache_misses: list[CacheMiss] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def num_retractions(self) -> int:
        """Number of requests that were retracted so far."""
        return len(self.retractions)

    @property
    def is_empty(self) -> bool:
        """Whether no request waited, no prefill was partial, and no running request gave its memory back."""
        return not (self.num_waiting or self.continued or self.gave_memory_back)

    def add_retraction(self, retraction: Retraction) -> None:
        """Note that a running request was retracted."""
        self.retractions.append(retraction)
        self.gave_memory_back = True

    def refuse_rest(self, reason: Reason, at: str = "") -> None:
        """Give one shared verdict to all waiting requests that have none yet.

        Args:
            reason: of that verdict.
            at: rid of the request at which the pass ended; "" if none.
        """
        self.num_rest = self.num_waiting - self.num_grammar - len(self.verdicts)
        if self.num_rest:
            self.rest_reason = reason
            self.rest_behind = at


def record_of(
    state: PassState,
    batch: ScheduleBatch | None,
    *,
    num_running: int,
    evicted_pages: int,
    pages: PageCounts,
    grammar_drafts: dict[str, MatcherDrafts],
) -> PassRecord:
    """Describe a pass that is over. The record shares the lists of the state, which is not written to any more.

    Args:
        state: of the pass.
        batch: the batch that the pass produced; None if none.
        num_running: requests with a row after the pass.
        evicted_pages: pages that the pass evicted from the prefix cache.
        pages: page counts after the pass.
        grammar_drafts: what matchers said about drafts.
    """
    record = PassRecord(
        state.now_s,
        num_waiting=state.num_waiting,
        budget_before=state.budget_before,
        budget_after=state.budget_after,
        verdicts=state.verdicts,
        num_rest=state.num_rest,
        rest_reason=state.rest_reason,
        rest_behind=state.rest_behind,
        num_grammar=state.num_grammar,
        continued=state.continued,
        retractions=state.retractions,
        gave_memory_back=state.gave_memory_back,
        num_running=num_running,
        evicted_pages=evicted_pages,
        cache_misses=state.cache_misses,
        pages=pages,
        policy=state.policy,
        notes=state.notes,
        step_time=state.step_time,
        grammar_drafts=grammar_drafts,
    )
    if batch is not None:
        plan = batch.plan
        record.step_id, record.mode, record.plan_crc = plan.step_id, plan.mode, batch.checksum()
        record.num_decodes = len(batch) - batch.num_extends
        record.num_drafts, record.num_rounds = batch.num_drafts, plan.num_rounds
        record.num_tiles = batch.num_tiles
    return record


logger = logging.getLogger(__name__)

PASSES_BEFORE_REPAIR: Final = 3
PASSES_BEFORE_ALARM: Final = 6


class StallSentinel:
    """Detects that requests wait, nothing runs, and no pass admits a request, by counting passes without progress.

    By design this cannot happen: a request that is feasible (`runtime/feasibility.py`) is admitted once nothing else
    runs. A watchdog that checks only while a batch is in flight never detects such a stall, a known trap in other
    engines. This one checks exactly when no batch is in flight.

    Attributes:
        stalled: why no request can be admitted, for `/health`; "" while there is no stall.
    """

    def __init__(self) -> None:
        self._num_passes = 0
        self.stalled = ""

    def progress(self) -> None:
        """Reset: a batch was planned, or no request waits, or every waiting request has a reason that passes."""
        if self.stalled:
            logger.warning("the stall is over")
        self._num_passes = 0
        self.stalled = ""

    def no_progress(self, state: PassState) -> bool:
        """Count a pass that admitted no request: requests wait, nothing is in flight, no reason passes by itself.

        Returns:
            whether the scheduler must try to repair its state now.
        """
        self._num_passes += 1
        if self._num_passes == PASSES_BEFORE_REPAIR:
            for verdict in state.verdicts:
                logger.error("stalled after %d passes: %s", self._num_passes, verdict.text())
            if state.rest_reason is not None:
                rest, why = state.num_rest, state.rest_reason.text
                logger.error("stalled after %d passes: %d others: %s", self._num_passes, rest, why)
            return True
        if self._num_passes >= PASSES_BEFORE_ALARM and not self.stalled:
            first = next((verdict.text() for verdict in state.verdicts), "no request was considered")
            self.stalled = f"{state.num_waiting} requests wait and none can be admitted: {first}"
            logger.error("stalled: %s", self.stalled)
        return False
