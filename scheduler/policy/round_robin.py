"""`RoundRobin`: tenants take turns, each for a quantum of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ...runtime.messages import FinishKind
from ..requests.chunk import Chunk
from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .base import SchedulePolicy
from .tenants import Offers, TenantQueue, output_tokens, prompt_tokens


class RoundRobin(SchedulePolicy):
    """Deficit round robin over tenants with waiting requests; by arrival within a tenant.

    Each tenant has a balance in tokens. When its turn begins it gets a quantum, its turn lasts while the balance is
    above 0, and all service (see `tenants.py`) is taken off, also what its running requests generate in other
    tenants' turns. Nobody knows the cost of a request beforehand, so a balance may fall below 0; such a debt is paid
    with the quanta of later turns. A turn that nobody can use because everything is full lasts until there is room;
    one whose requests may not start, because rules that concern them alone forbid it, ends when another tenant's
    request is admitted, and its tenant saves nothing up but stands at the end of the ring.

    Tenants that always have requests waiting which may start are served equally, whatever the sizes of their requests:
    with P the longest prompt, G the longest output and R how many can have started, the service of two differs by at
    most 3 * quantum + 2 * (P + R * G) over any time. For balances lie between -(P + R * G) and a quantum, and of two
    tenants in the ring neither has two turns without one of the other's between them. This holds for admission in the
    order given, so `looks_ahead` is False: past a request that lacks memory, small ones would be served for as long
    as they keep coming. (`fair` has the smaller bound; this keeps a tenant's requests together, which is kinder to the
    prefix cache.)

    A tenant without waiting requests has no turns and saves nothing up; when its last request has ended, its debt is
    forgotten. A pass costs O(tenants that wait). Source: Shreedhar and Varghese, "Efficient Fair Queuing using
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
            self._ring.whose_turn()  # passes it on, so that the quanta which a pass has used up are given for good

    def gained(self, req: Req, num_tokens: int) -> None:
        self._charge(req.tenant, num_tokens)

    def finished(self, req: Req, kind: FinishKind) -> None:
        queue = self._queues.get(req.tenant)
        if queue is not None:  # else it never got beyond its grammar
            queue.finished(req)
            if queue.is_idle:
                del self._queues[req.tenant], self._balances[req.tenant]

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        ring, offers = self._ring.copy(), Offers()
        while ring:
            tenant = ring.whose_turn()
            req = offers.next_of(self._queues[tenant])
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
    """Whose turn it is, and the balances of those who take turns."""

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
        """Take a tenant out; returns its balance. If it had the turn, the next one's begins."""
        had_turn = self._turns[0] == tenant
        self._turns.remove(tenant)
        if had_turn and self._turns:
            self._begin_turn()
        return self._balances.pop(tenant)

    def pass_to(self, tenant: str) -> None:
        """A tenant was served: those before it with a balance above 0 could not use their turns and lose them."""
        passed: dict[str, int] = {}
        while (holder := self.whose_turn()) != tenant:
            passed[holder] = min(0, self.leave(holder))
        for holder, balance in passed.items():
            self.join(holder, balance)

    def charge(self, tenant: str, tokens: int) -> None:
        self._balances[tenant] -= tokens

    def whose_turn(self) -> str:
        """The first tenant with a balance above 0; passes the turn over those before it, which have none."""
        turns, balances, quantum = self._turns, self._balances, self._quantum
        while True:
            for _ in range(len(turns)):
                if balances[turns[0]] > 0:
                    return turns[0]
                turns.rotate(-1)
                self._begin_turn()
            # A whole round has helped nobody out of debt: as many rounds at once as will still help nobody.
            rounds = -max(balances.values()) // quantum
            if rounds > 0:
                for tenant in balances:
                    balances[tenant] += rounds * quantum

    def _begin_turn(self) -> None:
        self._balances[self._turns[0]] += self._quantum
