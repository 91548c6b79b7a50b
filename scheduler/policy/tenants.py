"""What policies that share the engine between tenants have in common: a queue per tenant, and what counts as service.

Service is counted in tokens. Those of a prompt count all at once when the request is admitted, without the cached
ones: from then on the engine is bound to compute them. Those of an output count as they are generated. Nothing counts
twice, so whoever is retracted does not pay for it: a request that comes back computes again what it was charged for.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ..requests.chunk import Chunk
from ..requests.req import Req
from .ordered_index import OrderedIndex

_TENANT: Final = operator.attrgetter("tenant")


def prompt_tokens(req: Req, page_size: int) -> int:
    """What counts for the prompt of a request that has just been offered or taken out: 0 unless it was admitted.

    An admitted request has its prefix locked. The page that siblings copy from each other counts as computed.
    """
    if req.lease is None or req.num_retractions:
        return 0
    return req.fill_len - req.lease.num_pages * page_size


def output_tokens(chunks: Sequence[Chunk], decodes: Sequence[Req]) -> Counter[str]:
    """Tenant -> tokens that a step generates for it."""
    tokens = Counter(map(_TENANT, decodes))
    tokens.update(chunk.req.tenant for chunk in chunks if chunk.is_last)
    return tokens


class TenantQueue:
    """The requests of one tenant that have not ended.

    Attributes:
        tenant: whose.
        waiting: those in the queue, by arrival.
    """

    __slots__ = ("_started", "tenant", "waiting")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.waiting = OrderedIndex()
        self._started: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether all its requests have ended."""
        return not (self.waiting or self._started)

    def enqueued(self, req: Req) -> None:
        self._started.discard(req.seq)
        self.waiting.add(req, req.seq)

    def dequeued(self, req: Req) -> None:
        self.waiting.remove(req)
        self._started.add(req.seq)

    def finished(self, req: Req) -> None:
        self._started.discard(req.seq)


class Offers:
    """Reads the queues of tenants in turns, within one pass: each request is offered once."""

    __slots__ = ("_iterators",)

    def __init__(self) -> None:
        self._iterators: dict[str, Iterator[Req]] = {}

    def next_of(self, queue: TenantQueue) -> Req | None:
        """The tenant's oldest request that was not offered yet; None if all were."""
        iterator = self._iterators.get(queue.tenant)
        if iterator is None:
            iterator = self._iterators[queue.tenant] = iter(queue.waiting)
        return next(iterator, None)
