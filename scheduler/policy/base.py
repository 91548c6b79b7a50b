"""`SchedulePolicy`: what all policies have in common. A policy decides in which order waiting requests are offered.

Whether one fits is the PrefillAdder's business, and memory is never a policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final, NamedTuple

from ...runtime.messages import FinishKind
from ..prefix_cache.base import PrefixMatch
from ..records.verdict import Reason
from ..requests.chunk import Chunk
from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue

MAX_SORTED: Final = 128
"""Above so many waiting requests, looking them all up costs more than a good order gains: first come, first served."""


class Load(NamedTuple):
    """How busy the engine is, for policies that look at it.

    Attributes:
        num_running, max_running: requests with a row, and rows.
        kv_share: share of KV memory that requests hold or lock, 0..1.
    """

    num_running: int
    max_running: int
    kv_share: float


class PolicyParts(NamedTuple):
    """What policies may ask of the scheduler.

    Attributes:
        matches: the cached prefixes of waiting requests, perhaps as they were a few passes ago.
        page_size: tokens of a page of those matches.
        load: as of now.
    """

    matches: Callable[[Sequence[Req]], list[PrefixMatch]]
    page_size: int
    load: Callable[[], Load]


class SchedulePolicy:
    """Orders the waiting queue. The hooks do nothing here; a policy overrides what it needs.

    `enqueued` and `dequeued` are called for every request that enters or leaves the queue, for whatever reason, so a
    policy may keep an index of its own. Requests that wait for a grammar or have their KV on the host are not in it.
    """

    name: ClassVar[str] = ""
    looks_ahead: ClassVar[bool] = True
    """Whether a request that lacks memory may be overtaken; False where the order itself is the promise."""
    full_reason: ClassVar[Reason] = Reason.BEHIND
    """Why the others wait when `max_offers` have been offered."""

    by_priority: bool = False
    """Whether the order goes by `Req.priority`, so that the least urgent are retracted first; it may change."""
    preempts: bool = False
    """Whether running requests of lower `Req.priority` may are retracted to waiting ones; may change in time."""

    @property
    def active_name(self) -> str:
        """`name`, and which policy orders just now where there are several."""
        return self.name

    def enqueued(self, req: Req) -> None:
        """A request joined the queue: it is new, or it was retracted."""

    def dequeued(self, req: Req) -> None:
        """A request left the queue: it was admitted, and has its `lease`, or ended. In the order of admission."""

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        """A step was planned: so much is computed of prompts, and these generate a token."""

    def gained(self, req: Req, num_tokens: int) -> None:
        """A step generated so many tokens more for a request than the one of `planned`: right drafts, or a burst."""

    def finished(self, req: Req, kind: FinishKind) -> None:
        """A request has ended, with `output_len` tokens; `kind` tells whether the model had said what it wanted to."""

    def hold(self, waiting: WaitingQueue, now_s: float) -> Reason | None:
        """Why nobody may be admitted in this pass, whatever is free; None if somebody may."""
        return None

    def max_offers(self, waiting: WaitingQueue) -> int | None:
        """How many requests, those on the host among them, may be offered in this pass; None for no limit.

        Offers and not admissions: where only certain requests may start, nobody takes the place of one that cannot.
        Asked after `hold`; changes nothing.
        """
        return None

    def wake_s(self, waiting: WaitingQueue) -> float | None:
        """When `hold` may change its mind without any event; None if it will not."""
        return None

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        """The requests in the order in which they should be admitted. Changes nothing.

        May be lazy: the pass ends when a budget is spent, usually after a few requests of many; the queue does not
        change while it is read. Every waiting request comes exactly once. One that was just admitted has its `lease`
        when the next one is asked for, so that a lazy order can count with it.
        """
        raise NotImplementedError

    def may_displace(self, req: Req, victim: Req) -> bool:
        """Whether the order allows that a waiting request takes the place of a running one; asked if it `preempts`."""
        return self.preempts

    def take_notes(self) -> list[str]:
        """What the policy decided about itself since the last call, in words, for the decision log."""
        return []
