"""`Fair`: weighted fair queueing by tokens between tenants, with a bound that is proven.

Each tenant has a virtual counter of the service it was given (`tenants.py` says what counts): `PROMPT_WEIGHT` for each
computed token of a prompt, `OUTPUT_WEIGHT` for each generated one, which costs more. The waiting tenant with the
smallest counter is served next, its requests in the order of arrival. A tenant that comes back after an idle time has
its counter lifted to the smallest one of those that wait, so that nobody saves up service by being idle; it keeps a
larger counter that it had.

The bound. Say a tenant is *backlogged* while it has a request that waits and could start; let V be the smallest counter
of backlogged tenants, and while there are none, the counter at admission of the last one that was.
Let U = PROMPT_WEIGHT * P + OUTPUT_WEIGHT * R * G, with P the longest prompt, G the longest output, R the rows of the
pool: the prompt of one request, and the outputs of as many as can run.

1. V never falls: counters only grow, a tenant that joins is lifted to V, one that leaves was not below V.
2. V <= counter <= V + U for each backlogged tenant. The left side is the definition. For the right side look at the
   tenant's last admission, when its counter was V, since the smallest one is served. From then on it was charged for
   that prompt and for what its requests with a row have generated, at most U, or it was lifted to V and charged
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
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from ..prefill_adder import Chunk
from ..req import Req
from ..waiting_queue import WaitingQueue
from .base import SchedulePolicy
from .tenants import Offers, TenantQueue, prompt_tokens_just_admitted, tokens_served

PROMPT_WEIGHT: Final = 1
OUTPUT_WEIGHT: Final = 2
"""What a token costs, as the paper weighs them: a prompt's tokens share a step, those of an output take one each."""

MAX_IDLE_TENANTS: Final = 1024
"""Idle tenants whose counter is remembered; the one that is idle longest is forgotten first, and may start at V."""


class Fair(SchedulePolicy):
    """The tenant that was served least first; see the module. A pass costs O(tenants that wait), an arrival too."""

    name = "fair"
    looks_ahead = False

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._queues: dict[str, TenantQueue] = {}  # of tenants with requests
        self._backlogged: dict[str, TenantQueue] = {}
        self._counters: dict[str, int] = {}  # of tenants with requests, and of idle ones
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._floor = 0  # V, while nobody waits

    def enqueued(self, req: Req) -> None:
        tenant = req.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = TenantQueue(tenant)
            self._idle.pop(tenant, None)
        if not queue.waiting:
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._smallest_counter())
            self._backlogged[tenant] = queue
        queue.enqueued(req)

    def dequeued(self, req: Req) -> None:
        queue = self._queues[req.tenant]
        queue.dequeued(req)
        if not queue.waiting:
            del self._backlogged[req.tenant]
            if not self._backlogged:
                self._floor = self._counters[req.tenant]

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        served = tokens_served(chunks, decodes, prompt_weight=PROMPT_WEIGHT, output_weight=OUTPUT_WEIGHT)
        for tenant, tokens in served.items():
            if tenant in self._counters:
                self._counters[tenant] += tokens

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
        counters, offers = self._counters, Offers()
        # Equal counters: who waits longest. No two tenants share a request, so queues are never compared.
        heap = [
            (counters[tenant], queue.waiting.first.seq, queue) for tenant, queue in self._backlogged.items()
        ]
        heapq.heapify(heap)
        while heap:
            counter, _, queue = heap[0]
            req = offers.next_of(queue)
            if req is None:
                heapq.heappop(heap)
                continue
            yield req
            tokens = prompt_tokens_just_admitted(req, self._page_size)
            if tokens:
                heapq.heapreplace(heap, (counter + tokens * PROMPT_WEIGHT, req.seq, queue))

    def _smallest_counter(self) -> int:
        if not self._backlogged:
            return self._floor
        return min(map(self._counters.__getitem__, self._backlogged))
