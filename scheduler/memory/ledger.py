"""The page equation: `free + cached(evictable + locked) + held + incoming == total`, and every lock has an owner.

Host memory has an equation of its own (`host_pages.py`): `free + swapped + cached == total`.
In a model with state layers also that of checkpoints (`state_slots.py`): `free + planned + loading + cached == total`.

A page without an owner is lost until the process ends. A page with two owners corrupts an answer. Both bugs show late
and far from their cause, so the `Ledger` checks for them when the scheduler is idle, and after every step in tests.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..prefix_cache.base import Lease, PrefixCache
from ..requests.req import Req
from .kv_memory import RowMemory
from .pages import IncomingPages, LedgerError, PageAllocator


class Ledger:
    """Checks the accounts of pages, locks and rows. It changes nothing."""

    def __init__(
        self, allocator: PageAllocator, prefix_cache: PrefixCache, memory: RowMemory, incoming: IncomingPages
    ) -> None:
        self._incoming = incoming
        self._allocator = allocator
        self._cache = prefix_cache
        self._pool, self._kv, self._host = memory.pool, memory.kv, memory.host

    def check(self) -> None:
        """Check the equation with the counters. The cost does not grow with the number of cached pages.

        Raises:
            LedgerError: pages are missing or counted twice.
        """
        free, held = self._allocator.num_free, self._kv.held_pages
        evictable, locked = self._cache.evictable_pages, self._cache.locked_pages
        incoming, total = self._incoming.num_pages, self._allocator.num_pages
        counted = free + evictable + locked + held + incoming
        if counted != total:
            raise LedgerError(
                f"page equation: free {free} + evictable {evictable} + locked {locked} + held {held} + incoming "
                f"{incoming} = {counted}, but the pool has {total} pages"
            )
        host = self._host
        counted = host.num_free + host.num_swapped + host.num_cached
        if counted != host.num_pages:
            raise LedgerError(
                f"host equation: free {host.num_free} + swapped {host.num_swapped} + cached {host.num_cached} = "
                f"{counted}, but there are {host.num_pages} pages of host memory"
            )
        slots = self._kv.state_slots
        free, planned, cached = slots.num_free, len(slots.planned()), self._cache.num_checkpoints
        loading = len(slots.loading)
        counted = free + planned + loading + cached
        if counted != slots.num_checkpoints:
            raise LedgerError(
                f"state equation: free {free} + planned by rows {planned} + loading {loading} + checkpoints {cached} = "
                f"{counted}, but there are {slots.num_checkpoints} slots for checkpoints"
            )

    def check_idle(self) -> None:
        """Check the equation, and that without requests no page is held or locked and no row is taken.

        Raises:
            LedgerError: the message says what is still taken.
        """
        self.check()
        rows_out = self._pool.num_rows - self._pool.num_free_rows
        held = self._kv.held_pages + self._incoming.num_pages
        if held or self._cache.locked_pages or rows_out:
            raise LedgerError(
                f"no request is left, but {held} pages are held, {self._cache.locked_pages} are locked and "
                f"{rows_out} rows are taken"
            )
        if planned := self._kv.state_slots.planned():
            raise LedgerError(f"no request is left, but rows have planned the checkpoints {sorted(planned)}")
        if copied := [*self._kv.state_slots.loading, *self._kv.state_slots.stored]:
            raise LedgerError(
                f"no request is left, but the checkpoints {sorted(copied)} are loaded or stored"
            )
        if self._host.num_swapped:
            raise LedgerError(
                f"no request is left, but {self._host.num_swapped} pages of host memory are taken"
            )

    def audit(
        self, reqs: Iterable[Req], swapped: Iterable[Req] = (), other_leases: Iterable[Lease] = ()
    ) -> None:
        """Check every page. For tests: the cost grows with the number of pages.

        Args:
            reqs: all requests with a row.
            swapped: all requests with KV on the host.
            other_leases: those of transfers.

        Raises:
            LedgerError: for the first error found.
        """
        self.check()
        owners = np.zeros(self._allocator.num_pages + 1, dtype=np.int32)
        np.add.at(owners, self._allocator.free_pages(), 1)
        np.add.at(owners, self._cache.all_pages(), 1)
        np.add.at(owners, self._incoming.all_pages(), 1)
        leases = list(other_leases)
        for req in reqs:
            assert req.lease is not None, req
            leases.append(req.lease)
            row_pages = self._pool.pages[req.row, : self._pool.num_pages[req.row]]
            leased, own = row_pages[: req.lease.num_pages], row_pages[req.lease.num_pages :]
            np.add.at(owners, own, 1)
            if req.lease.num_pages and not np.array_equal(self._cache.pages_of(req.lease), leased):
                raise LedgerError(f"{req}: its row and its lease have different pages")
            if self._pool.num_leased[req.row] != req.lease.num_pages:
                raise LedgerError(f"{req}: num_leased differs from the length of its lease")
        if owners[0] or (owners[1:] != 1).any():
            wrong = np.flatnonzero(owners != 1)[1 - min(1, int(owners[0])) :][:8]
            raise LedgerError(f"pages {wrong.tolist()} have {owners[wrong].tolist()} owners instead of one")
        host_pages = [int(page) for req in swapped if req.host_pages is not None for page in req.host_pages]
        taken = self._host.num_swapped
        if len(set(host_pages)) != len(host_pages) or len(host_pages) != taken:
            raise LedgerError(
                f"{taken} pages of host memory are taken, swapped requests have {sorted(host_pages)}"
            )
        if len({*host_pages, *self._host.pages_cached()}) != taken + self._host.num_cached:
            raise LedgerError("pages of host memory are cached twice, or of swapped requests besides")
        slots = self._kv.state_slots
        cached = self._cache.checkpoints()
        checkpoints = sorted([*slots.free_slots(), *slots.planned(), *slots.loading, *cached])
        if checkpoints != list(range(1, slots.num_checkpoints + 1)):
            raise LedgerError(f"slots of checkpoints with an owner, in order: {checkpoints}")
        if lost := set(slots.stored) - set(cached):
            raise LedgerError(
                f"the checkpoints {sorted(lost)} are stored, but the prefix cache has dropped them"
            )
        for text in self._cache.verify(leases):
            raise LedgerError(text)
