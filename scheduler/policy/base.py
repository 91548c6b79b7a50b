"""`SchedulePolicy`: the base of all policies. A policy decides the order in which waiting requests are offered.

The `PrefillAdder` decides whether a request fits; a policy never decides about memory. `overtaken_first` and
`OrderedIndex` are common parts of policies.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

from ...runtime.messages import FinishKind
from ..prefix_cache.base import PrefixMatch
from ..records.verdict import Reason
from ..requests.req import MAX_OVERTAKEN, Chunk, Req
from ..requests.requests import WaitingQueue

MAX_SORTED: Final = 128
"""With more waiting requests, prefix cache look-ups cost more than a good order gains: first come, first served."""


class Load(NamedTuple):
    """The load of the engine, for policies that depend on it.

    Attributes:
        num_running, max_running: requests with a row, and rows.
        kv_share: share of KV memory that requests hold or lock, 0..1.
    """

    num_running: int
    max_running: int
    kv_share: float


class PolicyParts(NamedTuple):
    """The scheduler state that policies may read.

    Attributes:
        matches: the cached prefixes of waiting requests, possibly as of a few passes ago.
        page_size: tokens of a page of those matches.
        load: the current load.
    """

    matches: Callable[[Sequence[Req]], list[PrefixMatch]]
    page_size: int
    load: Callable[[], Load]


class SchedulePolicy:
    """Orders the waiting queue. The hooks do nothing here; a policy overrides the ones it needs.

    `enqueued` and `dequeued` are called for every request that enters or leaves the queue, for any reason, so a policy
    may maintain its own index. Requests that wait for a grammar or have their KV on the host are not in the queue.
    """

    name: ClassVar[str] = ""
    looks_ahead: ClassVar[bool] = True
    """Whether a request that lacks memory may be overtaken; False if the policy guarantees its order."""
    full_reason: ClassVar[Reason] = Reason.BEHIND
    """Reason why the other requests wait when `max_offers` have been offered."""

    by_priority: bool = False
    """Whether the order is by `Req.priority`, so that the least urgent are retracted first; may change over time."""
    preempts: bool = False
    """Whether waiting requests may preempt running ones of lower `Req.priority`; may change over time."""

    @property
    def active_name(self) -> str:
        """`name`, plus the active policy if there are several."""
        return self.name

    def enqueued(self, req: Req) -> None:
        """A request joined the queue: it is new, or it was retracted."""

    def dequeued(self, req: Req) -> None:
        """A request left the queue: it was admitted and has its `lease`, or it ended. In the order of admission."""

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        """A step was planned: it computes `chunks` of prompts, and the requests in `decodes` generate a token."""

    def gained(self, req: Req, num_tokens: int) -> None:
        """A step generated `num_tokens` more than `planned` counted: accepted drafts, or a multi-step decode."""

    def encoded(self, req: Req, num_tokens: int) -> None:
        """A step works on images of `req`, admitted or not, as long as `num_tokens` of a prompt take."""

    def finished(self, req: Req, kind: FinishKind) -> None:
        """A request has ended, with `output_len` tokens; `kind` says whether its answer is complete."""

    def hold(self, waiting: WaitingQueue, now_s: float) -> Reason | None:
        """Reason why no request may be admitted in this pass, even with free memory; None if requests may."""
        return None

    def max_offers(self, waiting: WaitingQueue) -> int | None:
        """The number of requests, swapped ones included, that may be offered in this pass; None for no limit.

        It limits offers and not admissions: if only certain requests may start, no other request replaces one that
        cannot. Called after `hold`; changes nothing.
        """
        return None

    def wake_s(self, waiting: WaitingQueue) -> float | None:
        """When the answer of `hold` may change without an event; None if it does not."""
        return None

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        """The requests in the order in which they should be admitted. Changes nothing.

        May be lazy: the pass ends when a budget is spent, usually after a few requests of many. The queue does not
        change while it is read. Every waiting request is yielded exactly once. A request that was admitted has its
        `lease` before the next one is requested, so a lazy order can take it into account.
        """
        raise NotImplementedError

    def may_displace(self, req: Req, victim: Req) -> bool:
        """Whether the order allows a waiting request to preempt a running one; called only if the policy `preempts`."""
        return self.preempts

    def take_notes(self) -> list[str]:
        """Changes of the policy's own state since the last call, in words, for the decision log."""
        return []


MAX_PASSED: Final = 256
"""The search ends after this many requests that were not overtaken; `Admission` counts it for as many."""


def overtaken_first(waiting: WaitingQueue, order: Iterable[Req]) -> Iterator[Req]:
    """Requests that were overtaken in `MAX_OVERTAKEN` passes, by arrival, then the others in the given order. Lazy.

    When a request is overtaken, all that arrived before it and still wait are overtaken as well. So the most overtaken
    requests stand at the front of the queue, except for those that joined later than they arrived: retracted ones, or
    ones that waited for their grammar.
    """
    yielded: set[int] = set()
    num_passed = 0
    for req in waiting:
        if req.num_overtaken >= MAX_OVERTAKEN:
            yielded.add(req.seq)
            yield req
        elif (num_passed := num_passed + 1) > MAX_PASSED:
            break
    for req in order:
        if req.seq not in yielded:
            yield req


class OrderedIndex:
    """Requests sorted by a number that does not change while they wait, so that a pass sorts nothing.

    A list and not a heap: it is read in order without being changed. Inserting moves pointers, 80 KB of them where
    10,000 requests wait, which takes a few microseconds.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []  # (key, seq): equals come in the order of arrival
        self._reqs: dict[int, tuple[float, Req]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Req]:
        """By ascending key, equals by arrival; do not change the index during the iteration."""
        reqs = self._reqs
        for _, seq in self._entries:
            yield reqs[seq][1]

    @property
    def first(self) -> Req:
        """The request with the smallest key; the index must not be empty."""
        return self._reqs[self._entries[0][1]][1]

    def add(self, req: Req, key: float) -> None:
        """Insert a request that is not in the index."""
        self._reqs[req.seq] = (key, req)
        bisect.insort(self._entries, (key, req.seq))

    def remove(self, req: Req) -> None:
        """Remove a request that is in the index."""
        key, _ = self._reqs.pop(req.seq)
        del self._entries[bisect.bisect_left(self._entries, (key, req.seq))]
