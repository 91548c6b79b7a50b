"""Common parts of the policies that share the engine between tenants: a queue per tenant, and the count of service.

Service is counted in tokens. The tokens of a prompt that are not cached count at once when the request is admitted,
because the engine will compute them. The tokens of an output count when they are generated. Work on an image counts
when a step does it, as the tokens of a prompt that take as long (`StepTarget.tokens_of`), for the request that needs it
first: an image that is encoded already is free, like a cached prefix. Nothing counts twice: a retracted request is not
charged for what it computes again, nor for images, also those that no step has encoded before.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ..requests.req import Chunk, Req
from .base import OrderedIndex

_TENANT: Final = operator.attrgetter("tenant")


def prompt_tokens(req: Req, page_size: int) -> int:
    """Service for the prompt of a request that was just offered or dequeued: 0 unless it was admitted.

    An admitted request has its prefix locked. A page that is copied from a sibling counts as computed.
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
        tenant: name of the tenant.
        waiting: its requests in the queue, by arrival.
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


def next_of(queue: TenantQueue, iterators: dict[str, Iterator[Req]]) -> Req | None:
    """The tenant's oldest request that was not yet offered in this pass; None if all were.

    Args:
        iterators: of the pass, by tenant; empty at its beginning.
    """
    return next(iterators.setdefault(queue.tenant, iter(queue.waiting)), None)
