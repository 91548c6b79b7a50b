"""`Fetches`: the requests that wait for a tier, and the pages and slots that are taken for their loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ...runtime.transport.kv_tiers import Found
from ..arrays import EMPTY, TOKEN_ID_BYTES, IntArray
from ..memory.kv_memory import KVMemory
from ..memory.pages import IncomingPages
from ..prefix_cache.base import Lease, PrefixCache, PrefixMatch
from ..requests.req import Req

MAX_LOADS: Final = 4
"""Prompts that are loaded at the same time, those that are loaded and have not started included."""
LOAD_SHARE: Final = 8
"""Their pages are at most 1/8 of the pool, unless it is a single prompt."""
STATE_SHARE: Final = 4
"""Their states take at most 1/4 of the slots for checkpoints, or one."""


@dataclass(slots=True)
class Fetch:
    """A RECEIVING request.

    Attributes:
        req: the request.
        job: of its `LookUp`, and of its `LoadPages`.
        expires_s: when it goes on without the tier.
        found: the answer to the look-up, with at least a page; None: there is none yet.
        lease: while it is loaded, the part of the prompt that the prefix cache had; else None.
        pages: [n] the pages for the part that is loaded.
        checkpoint: the slot for the state after them; 0: the model has no state layers.
        began_s: when the load was ordered.
        is_cut: it was canceled, and what is loaded until then is used.
    """

    req: Req
    job: int
    expires_s: float
    found: Found | None = None
    lease: Lease | None = None
    pages: IntArray = field(default_factory=lambda: EMPTY)
    checkpoint: int = 0
    began_s: float = 0.0
    is_cut: bool = False


class Fetches:
    """See the module.

    Attributes:
        draining: by job, those that are dropped; their pages and slots may still be written to.
        loaded: requests that were loaded and wait, with their pages.
    """

    def __init__(self, cache: PrefixCache, kv: KVMemory, incoming: IncomingPages) -> None:
        self._cache = cache
        self._kv = kv
        self._incoming = incoming
        self._page_bytes = kv.page_size * TOKEN_ID_BYTES
        self._slots = kv.state_slots
        self._has_states = kv.state_slots.num_checkpoints > 0
        self._by_job: dict[int, Fetch] = {}
        self._job_of: dict[str, int] = {}  # by rid
        self.draining: dict[int, Fetch] = {}
        self.loaded: list[tuple[Req, int]] = []

    def __len__(self) -> int:
        """Number of requests that wait for an answer, or for memory."""
        return len(self._by_job)

    def all(self) -> list[Fetch]:
        return [*self._by_job.values()]

    def get(self, job: int) -> Fetch | None:
        return self._by_job.get(job)

    def of(self, rid: str) -> Fetch | None:
        """The fetch of a request."""
        return self._by_job.get(self._job_of.get(rid, 0))

    def begin(self, fetch: Fetch) -> None:
        self._by_job[fetch.job], self._job_of[fetch.req.rid] = fetch, fetch.job

    def loading(self) -> Iterator[tuple[Fetch, Lease]]:
        for fetch in self._by_job.values():
            if fetch.lease is not None:
                yield fetch, fetch.lease

    @property
    def is_loading(self) -> bool:
        return bool(self.loaded or self.draining or next(self.loading(), None))

    def is_being_loaded(self, req: Req, num_pages: int) -> bool:
        """Whether the page after the first `num_pages` of a prompt is being loaded for another request."""
        end = (num_pages + 1) * self._page_bytes
        return any(
            fetch.req.extra_key == req.extra_key
            and lease.num_pages <= num_pages < lease.num_pages + len(fetch.pages)
            and fetch.req.fill_ids.startswith(req.fill_ids[:end])
            for fetch, lease in self.loading()
        )

    def may_load(self, num_pages: int) -> bool:
        """Whether one more load of so many pages may begin."""
        counts = [len(fetch.pages) for fetch, _ in self.loading()]
        counts += [len(drained.pages) for drained in self.draining.values()]
        counts += [count for _, count in self.loaded]
        fits = sum(counts) + num_pages <= self._kv.num_pages // LOAD_SHARE
        most = min(MAX_LOADS, self._slots.num_checkpoints // STATE_SHARE) if self._has_states else MAX_LOADS
        return not counts or (fits and len(counts) < most)

    def take_memory(self, fetch: Fetch, match: PrefixMatch, num_pages: int) -> Lease | None:
        """Lock what the prefix cache has, and take pages for the rest; None: there is no slot for the state."""
        req = fetch.req
        lease = self._cache.lock(req.extra_key, match, req.priority, is_use=False)
        if self._has_states:  # after the lock: it may drop a checkpoint, which ends matches
            fetch.checkpoint = self._slots.take()
            if not fetch.checkpoint:
                self._cache.release(lease)
                return None
        fetch.lease, fetch.pages = lease, self._incoming.take(num_pages)
        return lease

    def adopt(self, fetch: Fetch, lease: Lease, count: int) -> None:
        """End a load: its first pages, and with all of them its state, go to the prefix cache, the rest is free."""
        self._close(fetch)
        if count:
            begin = lease.num_pages * self._page_bytes
            token_ids = fetch.req.fill_ids[begin : begin + count * self._page_bytes]
            self._incoming.adopt(lease, token_ids, fetch.pages[:count])
            self._cache.note_stored(lease)
        self._incoming.give_back(fetch.pages[count:])
        self._end_checkpoint(fetch, lease if count else None)
        self._cache.release(lease)

    def leave(self, fetch: Fetch) -> bool:
        """Drop a fetch; True: it is being loaded, and its pages stay taken until `drained`."""
        self._close(fetch)
        if fetch.lease is None:
            return False
        self._cache.release(fetch.lease)
        self.draining[fetch.job] = fetch
        return True

    def drained(self, job: int) -> None:
        """Nothing is written to the pages of a dropped load any more."""
        drained = self.draining.pop(job)
        self._incoming.give_back(drained.pages)
        self._end_checkpoint(drained)

    def _end_checkpoint(self, fetch: Fetch, lease: Lease | None = None) -> None:
        """Nothing is written to the slot of a load any more; with a lease, it has the state after the lease's end."""
        if not fetch.checkpoint:
            return
        self._slots.loading.remove(fetch.checkpoint)
        if lease is None or not self._cache.keep_state(lease, lease.num_pages, fetch.checkpoint):
            self._slots.free(fetch.checkpoint)

    def _close(self, fetch: Fetch) -> None:
        del self._by_job[fetch.job], self._job_of[fetch.req.rid]
