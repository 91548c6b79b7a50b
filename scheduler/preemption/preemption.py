"""`Preemption`: how a running request is retracted, and which ones a more urgent request may preempt.

Six causes: KV memory ran out (`Decodes` chooses), a more urgent request came (`victims_for` chooses), an interactive
one needs the place of the background (`background_for`), the device had no memory for a step (`out_of_memory.py`), an
admin paused (`pause.py`), or `--chaos` asked for a fault (`chaos.py`). In each case the request returns to a queue with
its output so far; its KV is swapped to the host or computed again (`PreemptionMode`).
Sampling noise is keyed by position, so the request's text does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from ...runtime.config.engine_config import PreemptionModeName
from ..memory.kv_memory import RowMemory
from ..records.decision_log import Retraction
from ..records.stats import SchedulerStats
from ..requests.req import Req
from ..requests.requests import Requests

ASSUMED_BYTES_PER_S: Final = 10e9
"""Between device and host, until a swap has been measured; PCIe 4 x16 reaches twice this rate, shared links less."""
_EWMA_WEIGHT: Final = 0.2


class PreemptionMode:
    """Swap or recompute for a victim. This base: as the configuration has chosen, always the same."""

    def __init__(self, *, swaps: bool) -> None:
        self._swaps = swaps

    def swaps(self, num_tokens: int, num_pages: int) -> bool:
        """Whether to swap rather than to compute again.

        Args:
            num_tokens: tokens computed so far.
            num_pages: pages that they fill.
        """
        return self._swaps

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` of prompts and nothing else."""

    def measured_swap(self, num_pages: int, seconds: float) -> None:
        """`num_pages` were copied, in one direction."""


class ByCost(PreemptionMode):
    """Chooses what takes less time: copying the pages out and back, or computing the tokens again.

    Both rates are moving averages, measured while the engine runs: of steps that only compute prompts, and of swaps.
    Before the first prefill step the cost of computing is unknown, and recompute is chosen.

    Attributes:
        prefill_s_per_token: None before the first measurement.
        swap_s_per_page: from `ASSUMED_BYTES_PER_S` before the first measurement.
    """

    def __init__(self, page_bytes: int) -> None:
        super().__init__(swaps=False)
        self.prefill_s_per_token: float | None = None
        self.swap_s_per_page = page_bytes / ASSUMED_BYTES_PER_S

    def swaps(self, num_tokens: int, num_pages: int) -> bool:
        if self.prefill_s_per_token is None or not self.swap_s_per_page:  # one of the two costs is unknown
            return False
        return 2 * num_pages * self.swap_s_per_page < num_tokens * self.prefill_s_per_token

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens and seconds > 0:
            sample = seconds / num_tokens
            last = self.prefill_s_per_token
            self.prefill_s_per_token = sample if last is None else last + _EWMA_WEIGHT * (sample - last)

    def measured_swap(self, num_pages: int, seconds: float) -> None:
        if num_pages and seconds > 0:
            self.swap_s_per_page += _EWMA_WEIGHT * (seconds / num_pages - self.swap_s_per_page)


def make_preemption_mode(name: PreemptionModeName, page_bytes: int) -> PreemptionMode:
    """From the setting to the object."""
    return ByCost(page_bytes) if name == "cost" else PreemptionMode(swaps=name == "swap")


Cause = Literal["memory", "priority", "background", "device memory", "chaos", "pause"]


class Preemption:
    """Retracts in two steps, `retract` and `requeue`, so that no request joins a queue that is being read."""

    def __init__(
        self,
        requests: Requests,
        mode: PreemptionMode,
        *,
        memory: RowMemory,
        stats: SchedulerStats,
        priority_threshold: int,
    ) -> None:
        """`priority_threshold`: levels by which a waiting request must exceed the priority of its victim."""
        self._requests = requests
        self._mode = mode
        self._states, self._kv, self._host = memory.states, memory.kv, memory.host
        self._stats = stats
        self._threshold = priority_threshold
        self._retracted: list[Req] = []

    def retract(self, victim: Req, cause: Cause) -> Retraction:
        """Take a running request's row and pages; its KV goes to the host, or stays cached until it is evicted."""
        row = victim.row
        num_pages = self._kv.num_swappable_pages(victim)
        # A device without memory for a step has no memory for the copies of a swap either. After a pause weights may be
        # others, and KV on the host would be that of the old ones.
        swapped = cause not in ("device memory", "pause") and self._may_swap(victim, num_pages)
        if swapped:
            self._kv.swap_out(victim)
        victim.fill_ids = self._states.known_ids(row)  # the prompt and the generated tokens
        self._kv.release(victim, keep=True)
        self._retracted.append(victim)
        self._stats.retracted_reqs += 1
        self._stats.preempted_reqs += cause == "priority"
        mode = "swap" if swapped else "recompute"
        return Retraction(victim.rid, mode, cause, num_pages, victim.output_len)

    def requeue(self, now_s: float) -> None:
        """Put the retracted requests back into the waiting queue."""
        for req in self._retracted:
            self._requests.requeue(req, now_s)
        if self._retracted:
            self._retracted = []
            self._requests.remove_stopped()

    def background_for(self, lack_tokens: int, kept_for: Callable[[Req], int]) -> tuple[list[Req], int]:
        """Requests of the background to retract so that an interactive one can start: enough of them, or all.

        Those with the least work to lose go first: the shortest outputs, the newest among equals.

        Args:
            lack_tokens, kept_for: as for `victims_for`.

        Returns:
            the requests, and the slots that come free: of all, also those that they share only with each other.
        """
        candidates = self._requests.background_with_row
        candidates.sort(key=lambda each: (each.output_len, -each.seq))
        freed_tokens = shared_tokens = 0
        for num_victims, victim in enumerate(candidates, 1):
            freed_tokens += self._kv.num_own_pages(victim) * self._kv.page_size + kept_for(victim)
            shared_tokens += 0 if victim.lease is None else victim.lease.num_pages * self._kv.page_size
            if freed_tokens >= lack_tokens:
                return candidates[:num_victims], freed_tokens
        return candidates, freed_tokens + shared_tokens

    def lowest_priority(self) -> int:
        """The lowest priority of the running requests; a large number if none runs."""
        reqs = self._requests.running.reqs
        return min((req.priority for req in reqs if req.row >= 0 and not req.background), default=2**62)

    def outranks(self, req: Req, priority: int) -> bool:
        """Whether a request may preempt one of this priority."""
        return req.priority - priority > self._threshold

    def victims_for(
        self,
        req: Req,
        lack_tokens: int,
        kept_for: Callable[[Req], int],
        may_displace: Callable[[Req, Req], bool],
    ) -> list[Req]:
        """The running requests to preempt so that a waiting request can start: enough of them, or none.

        Lowest priority first, among equals the newest (sglang:managers/schedule_policy.py). A victim counts with the
        pages that it does not share, and with the tokens reserved for its output. Only decoding requests are victims.

        Args:
            lack_tokens: KV slots that must come free; 0 if only a row is missing.
            kept_for: tokens that the admission estimate reserves for the output of a running request.
            may_displace: the policy's decision; a running request that had waited for long enough is not displaced.
        """
        candidates = [
            each
            for each in self._requests.running.reqs
            if each.row >= 0  # without a row: retracted in this pass
            and not each.background
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
        if not 0 < num_pages <= self._host.num_available:
            return False
        if victim.needs_all_tokens or victim.background:  # host memory is for the others
            return False
        return self._mode.swaps(int(self._states.num_settled[victim.row]), num_pages)
