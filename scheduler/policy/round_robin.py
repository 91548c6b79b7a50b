"""`RoundRobin`: tenants take turns, each for a quantum of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ...runtime.messages import FinishKind
from ..requests.req import Chunk, Req
from ..requests.requests import WaitingQueue
from .base import SchedulePolicy
from .tenants import TenantQueue, next_of, output_tokens, prompt_tokens


class RoundRobin(SchedulePolicy):
    """Deficit round robin over tenants with waiting requests; by arrival within a tenant.

    Each tenant has a balance in tokens. When its turn begins it gets a quantum, and the turn lasts while the balance is
    above 0. All service (see `tenants.py`) is subtracted, including tokens that its running requests generate in other
    tenants' turns. The cost of a request is not known in advance, so a balance may fall below 0; the quanta of later
    turns pay this debt. If memory or rows are full, the turn lasts until a request can be admitted. If rules for single
    requests forbid all requests of the tenant to start, its turn ends when a request of another tenant is admitted; the
    tenant then moves to the end of the ring and loses its positive balance.

    Tenants that always have waiting requests which may start get equal service, independent of the request sizes. Let P
    be the longest prompt, G the longest output and R the largest number of started requests. Over any time the service
    of two tenants differs by at most 3 * quantum + 2 * (P + R * G): balances lie between -(P + R * G) and a quantum;
    of two tenants in the ring, neither has two turns without a turn of the other between them. This holds for admission
    in the given order, so `looks_ahead` is False: otherwise small requests could overtake one that lacks memory for as
    long as they keep coming. `fair` has the smaller bound; this policy serves a tenant's requests together, so their
    prefixes are more likely to be cached.

    A tenant without waiting requests has no turns and accumulates no balance; when its last request has ended, its debt
    is forgotten. A pass costs O(tenants that wait). Source: Shreedhar and Varghese, "Efficient Fair Queuing using
    Deficit Round Robin", SIGCOMM 1995; the debt instead of a deficit is "surplus round robin".
    """

    name = "round-robin"
    looks_ahead = False

    def __init__(self, quantum: int, page_size: int) -> None:
        self._page_size = page_size
        self._queues: dict[str, TenantQueue] = {}
        self._ring = _Ring(quantum)
        self._balances: dict[str, int] = {}  # of tenants that have requests, but none that wait

    def enqueued(self, req: Req) -> None:
        queue = self._queues.get(req.tenant)
        if queue is None:
            queue = self._queues[req.tenant] = TenantQueue(req.tenant)
        queue.enqueued(req)
        if len(queue.waiting) == 1:
            self._ring.join(req.tenant, min(0, self._balances.pop(req.tenant, 0)))

    def dequeued(self, req: Req) -> None:
        queue = self._queues[req.tenant]
        queue.dequeued(req)
        if req.lease is not None:
            self._ring.pass_to(req.tenant)
        self._ring.charge(req.tenant, prompt_tokens(req, self._page_size))
        if not queue.waiting:
            self._balances[req.tenant] = self._ring.leave(req.tenant)

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        for tenant, tokens in output_tokens(chunks, decodes).items():
            self._charge(tenant, tokens)
        if self._ring:
            self._ring.whose_turn()  # passes the turn on; `order` works on a copy, so the ring itself must advance

    def gained(self, req: Req, num_tokens: int) -> None:
        self._charge(req.tenant, num_tokens)

    def encoded(self, req: Req, num_tokens: int) -> None:
        if not req.num_retractions:
            self._charge(req.tenant, num_tokens)

    def finished(self, req: Req, kind: FinishKind) -> None:
        queue = self._queues.get(req.tenant)
        if queue is not None:  # None: the request ended while it waited for its grammar
            queue.finished(req)
            if queue.is_idle:
                del self._queues[req.tenant], self._balances[req.tenant]

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        ring = self._ring.copy()
        iterators: dict[str, Iterator[Req]] = {}
        while ring:
            tenant = ring.whose_turn()
            req = next_of(self._queues[tenant], iterators)
            if req is None:
                ring.leave(tenant)
                continue
            yield req
            ring.charge(tenant, prompt_tokens(req, self._page_size))

    def _charge(self, tenant: str, tokens: int) -> None:
        if tenant in self._balances:
            self._balances[tenant] -= tokens
        elif tenant in self._ring:
            self._ring.charge(tenant, tokens)


class _Ring:
    """The order of turns, and the balances of the tenants in it."""

    __slots__ = ("_balances", "_quantum", "_turns")

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._turns: deque[str] = deque()  # the first has the turn
        self._balances: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._balances

    def copy(self) -> _Ring:
        other = _Ring(self._quantum)
        other._turns, other._balances = self._turns.copy(), self._balances.copy()
        return other

    def join(self, tenant: str, balance: int) -> None:
        """Add a tenant at the end; its turn begins at once if it is alone."""
        self._turns.append(tenant)
        self._balances[tenant] = balance
        if len(self._turns) == 1:
            self._begin_turn()

    def leave(self, tenant: str) -> int:
        """Remove a tenant and return its balance. If it had the turn, the turn of the next one begins."""
        had_turn = self._turns[0] == tenant
        self._turns.remove(tenant)
        if had_turn and self._turns:
            self._begin_turn()
        return self._balances.pop(tenant)

    def pass_to(self, tenant: str) -> None:
        """A tenant was served: tenants before it with a balance above 0 could not use their turns and lose them."""
        passed: dict[str, int] = {}
        while (holder := self.whose_turn()) != tenant:
            passed[holder] = min(0, self.leave(holder))
        for holder, balance in passed.items():
            self.join(holder, balance)

    def charge(self, tenant: str, tokens: int) -> None:
        self._balances[tenant] -= tokens

    def whose_turn(self) -> str:
        """The first tenant with a balance above 0; the turn passes over the tenants before it, which have none."""
        turns, balances, quantum = self._turns, self._balances, self._quantum
        while True:
            for _ in range(len(turns)):
                if balances[turns[0]] > 0:
                    return turns[0]
                turns.rotate(-1)
                self._begin_turn()
            # After a whole round all tenants are still in debt: add as many rounds at once as leave all in debt.
            rounds = -max(balances.values()) // quantum
            if rounds > 0:
                for tenant in balances:
                    balances[tenant] += rounds * quantum

    def _begin_turn(self) -> None:
        self._balances[self._turns[0]] += self._quantum
