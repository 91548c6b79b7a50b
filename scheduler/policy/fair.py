"""`Fair`: weighted fair queueing by tokens between tenants, with a proven bound.

Each tenant has a virtual counter of the service that it has received (`tenants.py` defines service): `PROMPT_WEIGHT`
per computed prompt token, as much for work on images that takes as long, and `OUTPUT_WEIGHT` per generated token, which
costs more. The waiting tenant with the smallest counter is served next, its requests in the order of arrival. When a
tenant returns after an idle time, its counter is raised to the *floor* V, so that idle time accumulates no service; a
larger counter is kept. A counter below V is also raised when a request of the tenant is admitted. Its requests were in
the queue, but rules for single requests (a limit on adapters, a pending prefix) kept them from starting, and this
accumulates no service either.

The bound. A tenant is *backlogged* while it has a waiting request that those rules allow to start. If its counter was
below V, it is backlogged only from its first admission on. V is the largest value so far of two: the counter of an
admitted request's tenant before the admission, and the smallest counter of all tenants that wait.
Let U = PROMPT_WEIGHT * P + OUTPUT_WEIGHT * R * G, with P the longest prompt, G the longest output, and R the largest
number of requests that have started and not ended (rows, plus swapped requests). U covers the prompt of one request and
the outputs of all that can run. With images U also has PROMPT_WEIGHT * I * (R + A): I is the most that the images of a
request are charged, at the prices so far; A counts the waiting requests on whose first images steps work ahead
(`TileBudget.ahead`), at most the tiles of the encoder's buffer, unless clients abort them.

1. V never falls, by definition; counters only grow.
2. V <= counter of each backlogged tenant. This holds when the tenant becomes backlogged. When V is raised to the
   counter of a tenant that is admitted, no other backlogged tenant has a smaller counter: it would have been offered
   before, and a request that is offered and refused for lack of memory ends the pass. And no waiting tenant has a
   counter below the smallest.
3. counter <= V + U for each backlogged tenant. At its last admission its counter was V, by 2 and the definition. Since
   then it was charged for that prompt, for the tokens that its started requests generated, and for their images and
   those of A, at most U; or it was raised to V and then charged for those outputs and images alone. V has not fallen.
4. So the counters of two backlogged tenants differ by at most U. No counter is raised while its tenant is backlogged.
   So over any time in which two tenants are backlogged throughout, their service differs by at most 2 U. The bound
   depends neither on the length of that time nor on the other tenants, including those that cannot start.

This holds for admission in the given order, so `looks_ahead` is False: a request that lacks memory is not overtaken.
With overlapped steps a request may be charged for one surplus token after its end; G must include it.

Source: Sheng et al., "Fairness in Serving Large Language Models" (virtual token counter), OSDI 2024. Different here:
cached prefixes are free, and work that was lost by retraction is not charged again.
"""

from __future__ import annotations

import heapq
from collections import ChainMap, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ...runtime.messages import FinishKind
from ..requests.req import Chunk, Req
from ..requests.requests import WaitingQueue
from .base import SchedulePolicy
from .tenants import TenantQueue, next_of, output_tokens, prompt_tokens

PROMPT_WEIGHT: Final = 1
OUTPUT_WEIGHT: Final = 2
"""Cost of a token, as in the paper: the tokens of a prompt share a step, each token of an output needs its own."""

MAX_IDLE_TENANTS: Final = 1024
"""Idle tenants with a counter; the one that is idle longest is forgotten first, and may then start at V."""


class Fair(SchedulePolicy):
    """The tenant with the least service first; see the module.

    A pass copies the heap of waiting tenants, 0.1 ms for ten thousand of them, and needs O(log tenants) per offer.
    """

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
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._backlog.floor())
            self._backlog.join(queue)
        queue.enqueued(req)

    def dequeued(self, req: Req) -> None:
        tenant = req.tenant
        queue = self._queues[tenant]
        queue.dequeued(req)
        if req.lease is not None:
            self._counters[tenant] = self._backlog.raise_floor(self._counters[tenant])
        if not queue.waiting:
            self._backlog.leave(tenant)
        self._counters[tenant] += prompt_tokens(req, self._page_size) * PROMPT_WEIGHT

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        for tenant, tokens in output_tokens(chunks, decodes).items():
            self._charge(tenant, tokens * OUTPUT_WEIGHT)

    def gained(self, req: Req, num_tokens: int) -> None:
        self._charge(req.tenant, num_tokens * OUTPUT_WEIGHT)

    def encoded(self, req: Req, num_tokens: int) -> None:
        if not req.num_retractions:
            self._charge(req.tenant, num_tokens * PROMPT_WEIGHT)

    def finished(self, req: Req, kind: FinishKind) -> None:
        queue = self._queues.get(req.tenant)
        if queue is None:  # the request ended while it waited for its grammar
            return
        queue.finished(req)
        if queue.is_idle:
            del self._queues[req.tenant]
            self._idle[req.tenant] = None
            if len(self._idle) > MAX_IDLE_TENANTS:
                forgotten, _ = self._idle.popitem(last=False)
                del self._counters[forgotten]

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        counters: ChainMap[str, int] = ChainMap({}, self._counters)  # first map: this pass
        heap, floor = self._backlog.heap(), self._backlog.floor()
        iterators: dict[str, Iterator[Req]] = {}
        while (queue := self._backlog.least_served(heap, counters)) is not None:
            req = next_of(queue, iterators)
            if req is None:
                heapq.heappop(heap)
                continue
            yield req
            if req.lease is not None:  # admitted; see `dequeued`
                floor = max(floor, counters[queue.tenant])
                counters[queue.tenant] = floor + prompt_tokens(req, self._page_size) * PROMPT_WEIGHT

    def _charge(self, tenant: str, service: int) -> None:
        if tenant in self._counters:
            self._counters[tenant] += service


class _Backlog:
    """The tenants with waiting requests, least counter first, equals in the order in which they joined.

    A heap with entries that may be out of date. The counter of a waiting tenant only grows, so an old entry is too near
    to the top, and it is corrected when it reaches the top. Charging a tenant does not touch the heap.
    """

    def __init__(self, counters: Mapping[str, int]) -> None:
        self._counters = counters
        self._heap: list[tuple[int, int, TenantQueue]] = []
        self._serials: dict[
            str, int
        ] = {}  # tenant -> the serial number of its entry; other entries have left
        self._num_joined = 0
        self._floor = 0  # V of the module's text, as of the last call of `floor` or `raise_floor`

    def join(self, queue: TenantQueue) -> None:
        """Add a tenant that has waiting requests now."""
        self._num_joined += 1
        self._serials[queue.tenant] = self._num_joined
        heapq.heappush(self._heap, (self._counters[queue.tenant], self._num_joined, queue))

    def leave(self, tenant: str) -> None:
        """Remove a tenant without waiting requests."""
        self.floor()  # it may have been the smallest
        del self._serials[tenant]
        if len(self._heap) > 2 * len(self._serials) + 64:
            self._heap = [entry for entry in self._heap if self._serials.get(entry[2].tenant) == entry[1]]
            heapq.heapify(self._heap)

    def floor(self) -> int:
        """V of the module's text."""
        queue = self.least_served(self._heap, self._counters)
        return self._floor if queue is None else self.raise_floor(self._counters[queue.tenant])

    def raise_floor(self, counter: int) -> int:
        """A tenant with this counter is admitted; returns V."""
        self._floor = max(self._floor, counter)
        return self._floor

    def heap(self) -> list[tuple[int, int, TenantQueue]]:
        """A copy to take entries from."""
        self.least_served(self._heap, self._counters)  # corrects the top in the original, too
        return self._heap.copy()

    def least_served(
        self, heap: list[tuple[int, int, TenantQueue]], counters: Mapping[str, int]
    ) -> TenantQueue | None:
        """The tenant with the smallest counter; its entry is then on top of the heap. None if no tenant waits."""
        while heap:
            counter, serial, queue = heap[0]
            if self._serials.get(queue.tenant) != serial:
                heapq.heappop(heap)
            elif counters[queue.tenant] > counter:
                heapq.heapreplace(heap, (counters[queue.tenant], serial, queue))
            else:
                return queue
        return None
