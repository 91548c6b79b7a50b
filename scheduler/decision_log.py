"""`DecisionLog`: what each pass decided and why, for the last so many passes.

In every pass every waiting request has exactly one verdict: its own where it was looked at, else the shared one of
the rest. The rest is one count and one reason, so that a pass costs the same with ten waiting requests and with
ten thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from ..runtime.step_plan import ForwardMode
from .budget import BudgetState
from .verdict import Reason, Verdict

KEPT_PASSES: Final = 1024


class PassRecord:
    """One call of `Scheduler.next_batch`.

    Attributes:
        now_s: when.
        step_id: of the plan that came out; 0 if none did.
        mode: of that plan.
        num_waiting: requests in the queue when admission began.
        budget_before, budget_after: None where admission was not tried.
        verdicts: about the waiting requests that were looked at, in order.
        num_rest, rest_reason: how many were not, and why.
        rest_behind: the request at which the pass ended; "" if none.
        continued: about prompts in progress.
        retracted: rids.
        gave_memory_back: whether running requests lost theirs, so that another pass may find what this one did not.
        num_decodes: requests that decode in the step.
        evicted_pages: taken from the prefix cache in this pass.
    """

    __slots__ = (
        "budget_after",
        "budget_before",
        "continued",
        "evicted_pages",
        "gave_memory_back",
        "mode",
        "now_s",
        "num_decodes",
        "num_rest",
        "num_waiting",
        "rest_behind",
        "rest_reason",
        "retracted",
        "step_id",
        "verdicts",
    )

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.step_id = 0
        self.mode = ForwardMode.IDLE
        self.num_waiting = 0
        self.budget_before: BudgetState | None = None
        self.budget_after: BudgetState | None = None
        self.verdicts: list[Verdict] = []
        self.num_rest = 0
        self.rest_reason: Reason | None = None
        self.rest_behind = ""
        self.continued: list[Verdict] = []
        self.retracted: list[str] = []
        self.gave_memory_back = False
        self.num_decodes = 0
        self.evicted_pages = 0

    def end(self, reason: Reason, behind: str = "") -> None:
        """Give all waiting requests that have no verdict yet this one."""
        self.num_rest = self.num_waiting - len(self.verdicts)
        if self.num_rest:
            self.rest_reason = reason
            self.rest_behind = behind

    @property
    def is_empty(self) -> bool:
        """Nobody was there to decide about, and nothing came of it."""
        return not (self.num_waiting or self.num_decodes or self.continued or self.gave_memory_back)

    def lines(self) -> Iterator[str]:
        """For people: the pass, then each verdict."""
        yield (
            f"step={self.step_id} mode={self.mode.name} decodes={self.num_decodes} waiting={self.num_waiting} "
            f"evicted_pages={self.evicted_pages} retracted={','.join(self.retracted) or '-'}"
        )
        for verdict in (*self.continued, *self.verdicts):
            yield f"step={self.step_id} {verdict.text()}"
        if self.rest_reason is not None:
            behind = f" ({self.rest_behind})" if self.rest_behind else ""
            yield (
                f"step={self.step_id} {self.rest_reason.name} {self.num_rest} others: {self.rest_reason.value}{behind}"
            )


class DecisionLog:
    """The last `KEPT_PASSES` records of passes in which there was something to decide.

    Attributes:
        num_records: how many there have been.
    """

    __slots__ = ("_records", "num_records")

    def __init__(self, kept_passes: int = KEPT_PASSES) -> None:
        self._records: deque[PassRecord] = deque(maxlen=kept_passes)
        self.num_records = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[PassRecord]:
        """Oldest first."""
        return iter(self._records)

    @property
    def last(self) -> PassRecord:
        """The newest record."""
        return self._records[-1]

    def append(self, record: PassRecord) -> None:
        """Keep a record, and forget the oldest where there are too many."""
        self._records.append(record)
        self.num_records += 1

    def since(self, num_records: int) -> list[PassRecord]:
        """The records, as far as kept, that came after the first `num_records`, oldest first."""
        count = min(self.num_records - num_records, len(self._records))
        return [self._records[idx] for idx in range(-count, 0)]

    def about(self, rid: str) -> list[tuple[PassRecord, Verdict]]:
        """Every verdict of its own that is still kept about a request, oldest first."""
        return [
            (record, verdict)
            for record in self._records
            for verdict in (*record.verdicts, *record.continued)
            if verdict.rid == rid
        ]
