"""`PassState`: one pass of `Scheduler.next_batch` while it is planned, and `record_of`, which describes it for the log.

The parts of a pass write what they decide into its state and read there what earlier parts decided. No part reads a
`PassRecord`: what the decision log keeps, or drops, changes no decision.
"""

from __future__ import annotations

import msgspec

from .batch import ScheduleBatch
from .records.cache_miss import CacheMiss
from .records.decision_log import PageCounts, PassRecord, Retraction
from .records.pass_figures import BudgetState, StepTime
from .records.verdict import Reason, Verdict


class PassState(msgspec.Struct):
    """Made anew for each pass; `PassRecord` describes the attributes that both have.

    A msgspec struct, since one is made in each pass: it is constructed faster than a dataclass.

    Attributes:
        now_s: the time of the pass.
        policy: name of the policy at the beginning of the pass.
        num_waiting, num_grammar: requests in the queue when admission began, and those of them without their grammar.
        verdicts, continued: about waiting requests, and about prompts in progress, so far.
        num_rest, rest_reason, rest_behind: the shared verdict of the other waiting requests; see `refuse_rest`.
        retractions: the requests that were retracted so far, those of a failed step since the last pass included.
        gave_memory_back: whether a running request gave its row and pages back, so that another pass may admit more.
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
        """How many requests have were retracted so far."""
        return len(self.retractions)

    @property
    def is_empty(self) -> bool:
        """Whether no request waited, no prompt was in progress, and no running request gave its memory back."""
        return not (self.num_waiting or self.continued or self.gave_memory_back)

    def add_retraction(self, retraction: Retraction) -> None:
        """A running request was retracted."""
        self.retractions.append(retraction)
        self.gave_memory_back = True

    def refuse_rest(self, reason: Reason, at: str = "") -> None:
        """Give all waiting requests that have no verdict yet this one.

        Args:
            at: the request at which the pass ended.
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
) -> PassRecord:
    """Describe a pass that is over. The record shares the state's lists: nothing is written to them any more.

    Args:
        batch: what came of the pass.
        num_running: requests with a row after the pass.
        evicted_pages: pages that the pass took from the prefix cache.
        pages: after the pass.
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
    )
    if batch is not None:
        plan = batch.plan
        record.step_id, record.mode, record.plan_crc = plan.step_id, plan.mode, batch.checksum()
        record.num_decodes = len(batch) - batch.num_extends
        record.num_drafts, record.num_rounds = batch.num_drafts, plan.num_rounds
    return record
