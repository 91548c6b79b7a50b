"""`Preemption`: how a running request is retracted, and who must make place for somebody more urgent.

Four causes: KV memory ran out (`retraction.py` chooses), a more urgent request came (`victims_for` chooses), the device
had no memory for a step (`out_of_memory.py`), or a fault was asked for (`chaos.py`). In all of them the request goes
back to a queue with its output so far; its KV is swapped to the host or computed again (`preemption_mode.py`). Since
sampling noise is keyed by position, its text does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..memory.row_memory import RowMemory
from ..records.decision_log import Retraction
from ..records.stats import SchedulerStats
from ..requests.req import Req
from ..requests.requests import Requests
from .preemption_mode import PreemptionMode

Cause = Literal["memory", "priority", "device memory", "chaos"]


class Preemption:
    """Takes places away. Two steps, so that nobody joins a queue that is being read: `retract`, then `requeue`."""

    __slots__ = ("_host", "_kv", "_mode", "_requests", "_retracted", "_states", "_stats", "_threshold")

    def __init__(
        self,
        requests: Requests,
        mode: PreemptionMode,
        *,
        memory: RowMemory,
        stats: SchedulerStats,
        priority_threshold: int,
    ) -> None:
        """`priority_threshold`: levels by which a waiting request must exceed one whose place it takes."""
        self._requests = requests
        self._mode = mode
        self._states, self._kv, self._host = memory.states, memory.kv, memory.host
        self._stats = stats
        self._threshold = priority_threshold
        self._retracted: list[Req] = []

    def retract(self, victim: Req, cause: Cause) -> Retraction:
        """Take a running request's row and pages; its KV goes to the host, or stays cached while there is room."""
        row = victim.row
        num_pages = self._kv.num_swappable_pages(victim)
        # A device without memory for a step has none for the copies of a swap either.
        swapped = cause != "device memory" and self._may_swap(victim, num_pages)
        if swapped:
            self._kv.swap_out(victim)
        victim.fill_ids = self._states.known_ids(row)  # what it has generated follows the prompt
        self._kv.release(victim, keep=True)
        self._retracted.append(victim)
        self._stats.retracted_reqs += 1
        self._stats.preempted_reqs += cause == "priority"
        mode = "swap" if swapped else "recompute"
        return Retraction(victim.rid, mode, cause, num_pages, victim.output_len)

    def requeue(self, now_s: float) -> None:
        """Queue those whose places were taken."""
        for req in self._retracted:
            self._requests.requeue(req, now_s)
        if self._retracted:
            self._retracted = []
            self._requests.remove_stopped()

    def lowest_priority(self) -> int:
        """Of the running requests; a large number where none runs."""
        reqs = self._requests.running.reqs
        return min((req.priority for req in reqs if req.row >= 0), default=2**62)

    def outranks(self, req: Req, priority: int) -> bool:
        """Whether a request may take the place of one of this priority."""
        return req.priority - priority > self._threshold

    def victims_for(
        self,
        req: Req,
        lack_tokens: int,
        kept_for: Callable[[Req], int],
        may_displace: Callable[[Req, Req], bool],
    ) -> list[Req]:
        """Whose places a waiting request may take so that it can start: enough of them, or nobody.

        Lowest priority first, among equals the newest (sglang:managers/schedule_policy.py). A victim counts with the
        pages that nobody shares, and with what is kept for its output. Only requests that decode are asked.

        Args:
            lack_tokens: KV slots that must come free; 0 where only a row is missing.
            kept_for: tokens that the admission estimate keeps for the output of a running request.
            may_displace: the policy's say: who has waited for long enough keeps the place it was given.
        """
        candidates = [
            each
            for each in self._requests.running.reqs
            if each.row >= 0  # the others have lost it just now
            and self.outranks(req, each.priority)
            and may_displace(req, each)
        ]
        candidates.sort(key=lambda each: (each.priority, -each.seq))
        victims: list[Req] = []
        freed_tokens = 0
        for victim in candidates:
            victims.append(victim)
            freed_tokens += self._kv.num_own_pages(victim) * self._kv.page_size + kept_for(victim)
            if freed_tokens >= lack_tokens:
                return victims
        return []

    def _may_swap(self, victim: Req, num_pages: int) -> bool:
        if self._host.swap_in_reserved or not 0 < num_pages <= self._host.num_free:
            return False
        if victim.sampling.prompt_logprobs is not None and not victim.answered:
            return False  # all of its prompt has to be computed again, for the log-probabilities
        return self._mode.swaps(int(self._states.num_settled[victim.row]), num_pages)
