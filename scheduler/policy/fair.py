"""`Fair`: weighted fair queueing by tokens between tenants, with a bound that is proven.

Each tenant has a virtual counter of the service it was given (`tenants.py` says what counts): `PROMPT_WEIGHT` for each
computed token of a prompt, `OUTPUT_WEIGHT` for each generated one, which costs more. The waiting tenant with the
smallest counter is served next, its requests in the order of arrival. A tenant that comes back after an idle time has
its counter lifted to the smallest one of those that wait, so that nobody saves up service by being idle; it keeps a
larger counter that it had.

The bound. Say a tenant is *backlogged* while it has a request that waits and could start; let V be the smallest counter
of backlogged tenants, and while there are none, the counter at admission of the last one that was.
Let U = PROMPT_WEIGHT * P + OUTPUT_WEIGHT * R * G, with P the longest prompt, G the longest output, and R how many
requests can have started and not ended (rows, and those whose KV is on the host): the prompt of one request, and the
outputs of as many as can run.

1. V never falls: counters only grow, a tenant that joins is lifted to V, one that leaves was not below V.
2. V <= counter <= V + U for each backlogged tenant. The left side is the definition. For the right side look at the
   tenant's last admission, when its counter was V, since the smallest one is served. From then on it was charged for
   that prompt and for what its started requests have generated, at most U, or it was lifted to V and charged
   afterwards for those outputs alone; and V has not fallen.
3. So counters of two backlogged tenants differ by at most U; and since nobody is lifted while it is backlogged, the
   service of two tenants over any time in which both are backlogged throughout differs by at most 2 U, however long
   that time is, and whatever the others do.

This holds for admission in the order given, so `looks_ahead` is False: nobody overtakes a request that lacks memory.
With overlapped steps a request may be charged for one surplus token after its end, which G has to include.

Source: Sheng et al., "Fairness in Serving Large Language Models" (virtual token counter), OSDI 2024. Different here:
cached prefixes are free, and work that was lost by retraction is not charged again.
"""

from __future__ import annotations

import heapq
from collections import ChainMap, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..prefill_adder import Chunk
from ..req import Req
from ..waiting_queue import WaitingQueue
from .base import SchedulePolicy
from .tenants import Offers, TenantQueue, output_tokens, prompt_tokens

PROMPT_WEIGHT: Final = 1
OUTPUT_WEIGHT: Final = 2
"""What a token costs, as the paper weighs them: a prompt's tokens share a step, those of an output take one each."""

MAX_IDLE_TENANTS: Final = 1024
"""Idle tenants whose counter is remembered; the one that is idle longest is forgotten first, and may start at V."""


class Fair(SchedulePolicy):
    """The tenant that was served least first; see the module. Costs O(log tenants) per request that is offered."""

    name = "fair"
    looks_ahead = False

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._queues: dict[str, TenantQueue] = {}  # of tenants with requests
        self._counters: dict[str, int] = {}  # of tenants with requests, and of idle ones
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._backlog = _Backlog(self._counters)

    def enqueued(self, req: Req) -> None:
        tenant = req.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = TenantQueue(tenant)
            self._idle.pop(tenant, None)
        if not queue.waiting:
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._backlog.smallest_counter())
            self._backlog.join(queue)
        queue.enqueued(req)

    def dequeued(self, req: Req) -> None:
        queue = self._queues[req.tenant]
        queue.dequeued(req)
        if not queue.waiting:
            self._backlog.leave(req.tenant)
        self._counters[req.tenant] += prompt_tokens(req, self._page_size) * PROMPT_WEIGHT

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        for tenant, tokens in output_tokens(chunks, decodes).items():
            if tenant in self._counters:
                self._counters[tenant] += tokens * OUTPUT_WEIGHT

    def finished(self, req: Req) -> None:
        queue = self._queues.get(req.tenant)
        if queue is None:  # it never got beyond its grammar
            return
        queue.finished(req)
        if queue.is_idle:
            del self._queues[req.tenant]
            self._idle[req.tenant] = None
            if len(self._idle) > MAX_IDLE_TENANTS:
                forgotten, _ = self._idle.popitem(last=False)
                del self._counters[forgotten]

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        counters: ChainMap[str, int] = ChainMap({}, self._counters)  # what this pass adds is in the first
        heap, offers = self._backlog.heap(), Offers()
        while (queue := self._backlog.least_served(heap, counters)) is not None:
            req = offers.next_of(queue)
            if req is None:
                heapq.heappop(heap)
                continue
            yield req
            counters[queue.tenant] += prompt_tokens(req, self._page_size) * PROMPT_WEIGHT


class _Backlog:
    """The tenants with waiting requests, least counter first, equals in the order in which they joined.

    A heap with entries that may be out of date: while a tenant waits its counter only grows, so an old entry stands too
    far in front, and is put right when it comes to the top. Charging a tenant costs nothing here.
    """

    __slots__ = ("_counters", "_floor", "_heap", "_num_joined", "_serials")

    def __init__(self, counters: Mapping[str, int]) -> None:
        self._counters = counters
        self._heap: list[tuple[int, int, TenantQueue]] = []
        self._serials: dict[
            str, int
        ] = {}  # tenant -> the serial number of its entry; other entries have left
        self._num_joined = 0
        self._floor = 0  # V of the module's text, while nobody waits

    def join(self, queue: TenantQueue) -> None:
        """A tenant waits from now on."""
        self._num_joined += 1
        self._serials[queue.tenant] = self._num_joined
        heapq.heappush(self._heap, (self._counters[queue.tenant], self._num_joined, queue))

    def leave(self, tenant: str) -> None:
        """A tenant waits no more."""
        del self._serials[tenant]
        if not self._serials:
            self._floor = self._counters[tenant]
        if len(self._heap) > 2 * len(self._serials) + 64:
            self._heap = [entry for entry in self._heap if self._serials.get(entry[2].tenant) == entry[1]]
            heapq.heapify(self._heap)

    def smallest_counter(self) -> int:
        """V of the module's text."""
        queue = self.least_served(self._heap, self._counters)
        return self._floor if queue is None else self._counters[queue.tenant]

    def heap(self) -> list[tuple[int, int, TenantQueue]]:
        """A copy to take entries from."""
        self.least_served(self._heap, self._counters)  # puts the top right for good
        return self._heap.copy()

    def least_served(
        self, heap: list[tuple[int, int, TenantQueue]], counters: Mapping[str, int]
    ) -> TenantQueue | None:
        """The tenant with the smallest counter, whose entry is then on top of the heap; None if nobody waits."""
        while heap:
            counter, serial, queue = heap[0]
            if self._serials.get(queue.tenant) != serial:
                heapq.heappop(heap)
            elif counters[queue.tenant] > counter:
                heapq.heapreplace(heap, (counters[queue.tenant], serial, queue))
            else:
                return queue
        return None
