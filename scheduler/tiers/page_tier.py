"""`PageTier`: decides which prompts are looked up in a tier, loaded from it and stored there.

A tier is the disk of `--kv-disk`, or the store of `--kv-store`.

Like the scheduler, it does no I/O and uses no clock: commands for the I/O thread go out, its news come in (see
`runtime/transport/kv_tiers.py`). Between device and tier only whole pages of the prefix cache travel.

    WAITING ── the prefix cache lacks much of the prompt: LookUp ──► RECEIVING
                 Found: the tier has none of it                      ──► WAITING: the prompt is computed
                 Found ── by arrival, with room: pages taken, LoadPages
                 Loaded: the pages go to the prefix cache            ──► WAITING: as any other with a cached prefix

A request that has ended, or waits too long, leaves RECEIVING at once. Its pages stay `incoming` until `Loaded` says
that nothing will be written to them any more. So the tier can delay a request for a bounded time, and never fail it.

In a model with state layers the state after the last page travels with the pages: the prefix cache gets both or none.

`Fetches` has the memory of the loads. `PromptStores` decides what is stored, and when.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

from ...runtime.config.engine_config import CacheConfig
from ...runtime.feasibility import pages_for
from ...runtime.messages import TokenOutput
from ...runtime.step_plan import ForwardMode
from ...runtime.transport.kv_tiers import (
    CancelLoad,
    Forget,
    Forgotten,
    Found,
    Loaded,
    LoadPages,
    LookUp,
    Stored,
    TierCommand,
    TierFigures,
)
from ..admission.budget import Reservations
from ..arrays import TOKEN_ID_BYTES
from ..batch import ScheduleBatch
from ..memory.kv_memory import KVMemory
from ..memory.pages import IncomingPages
from ..prefix_cache.base import Lease, PrefixCache, PrefixMatch
from ..requests.req import Req, ReqStatus
from ..requests.requests import Requests
from ..transfer.role import NO_CHANGES, Changes, News, Step, TransferRole
from .fetches import MAX_LOADS, Fetch, Fetches
from .prompt_stores import PromptStores, TierCounts

MIN_TOKENS: Final = 256
"""A prompt with fewer missing tokens is computed; one with fewer tokens is not stored."""
WORTH_SHARE: Final = 0.7
"""A prompt is loaded if that takes less than this share of the time of computing it."""
_RATE_WEIGHT: Final = 0.3

LOOK_UP_LIMIT_S: Final = 2.0
ROOM_LIMIT_S: Final = 60.0
"""A request waits at most this long for the memory of its load, or for the loads before it."""
LOAD_LIMIT_FACTOR: Final = 2.0
MIN_LOAD_LIMIT_S: Final = 1.0
UNKNOWN_LOAD_LIMIT_S: Final = 30.0
"""A load may take twice its estimate, but at least the first of these; without an estimate the second."""
WAIT_LIMIT_S: Final = 600.0
"""The limit of a load with `--kv-fetch wait`, for a disk that never answers."""

_BY_ARRIVAL: Final = operator.attrgetter("req.seq")
_QUEUED: Final = (ReqStatus.WAITING, ReqStatus.RETRACTED)


def _by_priority(fetch: Fetch) -> tuple[int, int]:
    return -fetch.req.priority, fetch.req.seq


class PageTier(TransferRole):
    """See the module."""

    def __init__(
        self,
        requests: Requests,
        cache: PrefixCache,
        kv: KVMemory,
        incoming: IncomingPages,
        reservations: Reservations,
        settings: CacheConfig,
        *,
        num_rows: int,
        by_priority: bool,
    ) -> None:
        """Take the parts.

        Args:
            num_rows: requests that can run at the same time.
            by_priority: requests of the highest priority are loaded first.
        """
        self._name = settings.kv_tier
        self._fetch_kind, self._fetch_limit_s = settings.kv_fetch_rule()
        self._num_rows = num_rows
        self._requests = requests
        self._cache = cache
        self._kv = kv
        self._incoming = incoming
        self._reservations = reservations
        self._order: Callable[[Fetch], Any] = _by_priority if by_priority else _BY_ARRIVAL
        self._min_pages = pages_for(MIN_TOKENS, kv.page_size)
        self._page_bytes = kv.page_size * TOKEN_ID_BYTES
        self._jobs = itertools.count(1)
        self._fetches = Fetches(cache, kv, incoming)
        self._is_late = False  # an answer is overdue: nothing is asked until the next one
        self._prefill_s_per_token: float | None = None  # of steps that compute prompts alone
        self._commands: list[TierCommand] = []
        self._counts = TierCounts()
        self._stores = PromptStores(
            cache,
            kv,
            incoming,
            self._counts,
            self._jobs,
            self._commands,
            settings,
            min_pages=self._min_pages,
        )

    @property
    def num_open(self) -> int:
        return len(self._fetches) + len(self._fetches.draining) + len(self._stores)

    def arrived(self, req: Req, now_s: float) -> Sequence[Step]:
        if self._is_late or req.status not in _QUEUED or req.needs_all_tokens:
            return ()
        num_pages = (req.fill_len - 1) // self._kv.page_size
        is_short = num_pages - self._kv.num_ready_pages(req) < self._min_pages
        if is_short or not self._stores.may_persist(req.extra_key):
            return ()
        req.looked_up_after = req.num_retractions
        self._requests.await_kv(req, now_s)
        fetch = Fetch(req, next(self._jobs), now_s + min(LOOK_UP_LIMIT_S, self._fetch_limit_s or math.inf))
        self._fetches.begin(fetch)
        self._counts.lookups += 1
        self._commands.append(LookUp(fetch.job, req.extra_key, req.fill_ids[: num_pages * self._page_bytes]))
        return (Step(req.rid, "looked up"),)

    def plan(self, now_s: float) -> Changes:
        if not self._requests:
            self._stores.store_one_more()
        self._stores.store_ahead()
        steps = self._look_up_retracted(now_s)
        if not self._fetches:
            return NO_CHANGES
        self._fetches.loaded = [each for each in self._fetches.loaded if each[0].status in _QUEUED]
        for fetch in self._fetches.all():
            if fetch.expires_s <= now_s:
                self._is_late = self._is_late or fetch.found is None or fetch.lease is not None
                self._leave(fetch)
                steps.append(
                    self._go_on(fetch.req, "not loaded", "it took too long", now_s, failure="timeout")
                )
            elif (
                self._fetch_kind == "best_effort"
                and fetch.lease
                and not fetch.is_cut
                and self._may_start(fetch.req)
            ):
                fetch.is_cut = True
                self._commands.append(CancelLoad(fetch.job))
        self._load_waiting(now_s, steps)
        return Changes(steps) if steps else NO_CHANGES

    def settled(self, batch: ScheduleBatch, forward_s: float) -> None:
        num_tokens = batch.plan.total_num_scheduled_tokens
        if batch.plan.mode is ForwardMode.EXTEND and num_tokens:
            sample, last = forward_s / num_tokens, self._prefill_s_per_token
            self._prefill_s_per_token = sample if last is None else last + _RATE_WEIGHT * (sample - last)
        for idx in range(batch.num_extends):
            if batch.end[idx] >= batch.reqs[idx].prompt_len:
                self._stores.note_prompt(batch.reqs[idx])
        self._stores.store_waiting()

    def answered(self, rows: Sequence[TokenOutput], now_s: float) -> Sequence[Step]:
        for row in rows if self._fetches else ():
            if row.finish is not None and (fetch := self._fetches.of(row.rid)) is not None:
                self._leave(fetch)
        return ()

    def handle(self, message: News, now_s: float) -> Changes:
        self._is_late = False
        if isinstance(message, Found | Stored) and message.used_bytes >= 0:
            self._counts.used_bytes = message.used_bytes
        match message:
            case Found(job=job) if (fetch := self._fetches.get(job)) and fetch.found is None:
                self._counts.note_error("lookup", message.error)
                why = self._reason_against(fetch.req, message)
                if not why:
                    fetch.found, fetch.expires_s = message, now_s + (self._fetch_limit_s or ROOM_LIMIT_S)
                    return NO_CHANGES  # the next pass loads it
                self._leave(fetch)
                return Changes([self._go_on(fetch.req, "not loaded", why, now_s)])
            case Loaded(job=job) if job in self._fetches.draining:
                self._fetches.drained(job)
            case Loaded(job=job) if (fetch := self._fetches.get(job)) and fetch.lease is not None:
                return Changes([self._take(fetch, fetch.lease, message, now_s)])
            case Forgotten(job=call_id, error=error):
                return Changes(flushes=[(call_id, error)])
            case Stored():
                self._stores.stored(message, is_idle=not self._requests)
            case _:
                pass  # of a job that has ended
        return NO_CHANGES

    def flushed(self, call_id: int, now_s: float) -> Changes:
        """The tier forgets, too; what it is asked for now is not loaded."""
        self._stores.forget()
        self._commands.append(Forget(call_id))
        steps = []
        for fetch in self._fetches.all():
            self._leave(fetch)
            steps.append(self._go_on(fetch.req, "not loaded", "the cache was flushed", now_s))
        return Changes(steps)

    def close(self) -> None:
        self._stores.close()

    def take_commands(self) -> list[TierCommand]:
        commands = [*self._commands]
        self._commands.clear()
        return commands

    def wake_s(self) -> float | None:
        return min((fetch.expires_s for fetch in self._fetches.all()), default=None)

    def leases(self) -> list[Lease]:
        return [*self._stores.leases(), *(lease for _, lease in self._fetches.loading())]

    def tier_figures(self) -> dict[str, TierFigures]:
        counts = self._counts
        figures = TierFigures(
            waiting=len(self._fetches),
            loading_pages=self._incoming.num_pages,
            leased_pages=self._incoming.num_read,
            lookups=counts.lookups,
            loaded_tokens=counts.loaded_tokens,
            loaded_bytes=counts.loaded_bytes,
            stored_bytes=counts.stored_bytes,
            used_bytes=counts.used_bytes,
            load_s=counts.load_s,
            store_s=counts.store_s,
            timeouts=counts.errors["timeout"],
            load_errors=counts.errors["load"],
            store_errors=counts.errors["store"],
            lookup_errors=counts.errors["lookup"],
        )
        return {self._name: figures}

    def _look_up_retracted(self, now_s: float) -> list[Step]:
        """Look up retracted requests, which are the first of the queue, when they could go on: once each time."""
        steps: list[Step] = []
        if self._requests.num_with_row >= self._num_rows:
            return steps
        for req in [*islice(self._requests.waiting, MAX_LOADS)]:
            if req.status is ReqStatus.RETRACTED and req.looked_up_after < req.num_retractions:
                match = self._kv.match(req)
                needed = pages_for(req.fill_len + 1, self._kv.page_size) - match.num_pages
                if self._reservations.leave_room(
                    needed + self._kv.unlocked_pages(match), self._kv.available_pages
                ):
                    steps += self.arrived(req, now_s)
        return steps

    # ------------------------------------------------------------ loads

    def _load_waiting(self, now_s: float, steps: list[Step]) -> None:
        """Order the loads of requests that were found, up to the first one that must wait."""
        waiting = [fetch for fetch in self._fetches.all() if fetch.found and fetch.lease is None]
        for fetch in sorted(waiting, key=self._order):
            req, found = fetch.req, fetch.found
            assert found is not None
            match = self._cache.match(req.extra_key, req.fill_ids, found.num_pages)
            missing = found.num_pages - match.num_pages
            if missing <= 0 or self._is_late:
                self._leave(fetch)
                why = (
                    "the prefix cache has it by now" if missing <= 0 else f"the {self._name} does not answer"
                )
                steps.append(self._go_on(req, "not loaded", why, now_s))
            elif self._fetches.is_being_loaded(req, match.num_pages):
                continue  # by another request: this one finds the pages in the prefix cache
            elif not self._fetches.may_load(missing):
                return
            elif self._reservations.leave_room(
                missing + self._kv.unlocked_pages(match), self._kv.available_pages
            ) and self._load(fetch, match, missing, now_s):
                steps.append(
                    Step(req.rid, "loading", f"{missing} of {found.num_pages} pages on {self._name}")
                )
            elif self._requests.num_with_row or self._fetches.is_loading:
                return  # they end, and give memory back
            else:
                self._leave(fetch)
                steps.append(self._go_on(req, "not loaded", "there is no memory for it", now_s))

    def _reason_against(self, req: Req, found: Found) -> str:
        """Reason not to load what was found; "" if it is worth the time. An unknown time is tried."""
        missing = found.num_pages - self._kv.match(req).num_pages
        if missing <= 0:
            return (
                f"the {self._name} has no more of it than the prefix cache"
                if found.num_pages
                else found.error or f"the {self._name} has none of it"
            )
        if self._prefill_s_per_token is None or self._fetch_kind == "wait":
            return ""
        load_s = (
            found.seconds_estimate * _bytes_of(found, missing) / max(1, _bytes_of(found, found.num_pages))
        )
        compute_s = missing * self._kv.page_size * self._prefill_s_per_token
        if load_s < WORTH_SHARE * compute_s:
            return ""
        return f"loading it was estimated at {load_s:.3f} s, computing it at {compute_s:.3f} s"

    def _may_start(self, req: Req) -> bool:
        """Whether a request that is being loaded could start now, if it waited for nothing else."""
        return (
            not self._requests.waiting
            and self._requests.num_with_row < self._num_rows
            and self._reservations.leave_room(
                pages_for(req.fill_len + 1, self._kv.page_size), self._kv.available_pages
            )
        )

    def _load(self, fetch: Fetch, match: PrefixMatch, num_pages: int, now_s: float) -> bool:
        """Order a load; False: there is no slot for the state."""
        req, found = fetch.req, fetch.found
        assert found is not None
        # The tier may load one prompt after the other.
        estimates = [found, *(other.found for other, _ in self._fetches.loading() if other.found)]
        lease = self._fetches.take_memory(fetch, match, num_pages)
        if lease is None:
            return False
        estimate_s = sum(each.seconds_estimate for each in estimates)
        known = all(each.seconds_estimate > 0.0 for each in estimates)
        limit_s = max(LOAD_LIMIT_FACTOR * estimate_s, MIN_LOAD_LIMIT_S) if known else UNKNOWN_LOAD_LIMIT_S
        if self._fetch_kind == "wait":
            limit_s = WAIT_LIMIT_S
        fetch.began_s = now_s
        if self._fetch_limit_s is None:  # else it counts from the answer to the look-up
            fetch.expires_s = now_s + limit_s
        token_ids = req.fill_ids[: found.num_pages * self._page_bytes]
        self._commands.append(
            LoadPages(
                fetch.job, req.extra_key, token_ids, lease.num_pages, fetch.pages.tobytes(), fetch.checkpoint
            )
        )
        return True

    def _take(self, fetch: Fetch, lease: Lease, message: Loaded, now_s: float) -> Step:
        """Give what is loaded to the prefix cache; the request waits as any other from now on."""
        req, count = fetch.req, min(message.num_pages, len(fetch.pages))
        if fetch.checkpoint and count < len(fetch.pages):
            count = 0  # there is no state at their end
        self._fetches.adopt(fetch, lease, count)
        self._counts.note_error("load", message.error)
        self._counts.loaded_tokens += count * self._kv.page_size
        self._counts.loaded_bytes += message.num_bytes
        self._counts.load_s += message.seconds
        if not count:
            return self._go_on(req, "not loaded", message.error or f"the {self._name} has lost it", now_s)
        tokens = count * self._kv.page_size
        if not req.num_delivered and not req.num_retractions:
            req.loaded_tokens = tokens
        self._fetches.loaded.append((req, count))
        words = f"{tokens:,} of {req.prompt_len:,} prompt tokens from {self._name} in {now_s - fetch.began_s:.3f} s"
        if fetch.found is not None and fetch.found.num_pages:
            words += f" ({_bytes_of(fetch.found, count) / 1e6:,.1f} MB)"
        if self._prefill_s_per_token is not None:
            words += f"; computing them was estimated at {tokens * self._prefill_s_per_token:.3f} s"
        return self._go_on(req, "loaded", words, now_s)

    def _leave(self, fetch: Fetch) -> None:
        """Drop a fetch; if it is being loaded, its pages stay taken until the I/O thread has answered."""
        if self._fetches.leave(fetch):
            self._commands.append(CancelLoad(fetch.job))

    def _go_on(self, req: Req, event: str, detail: str, now_s: float, failure: str = "") -> Step:
        if failure:
            self._counts.note_error(failure, detail)
        self._requests.kv_ready(req, now_s)
        return Step(req.rid, event, detail)


def _bytes_of(found: Found, num_pages: int) -> float:
    """Bytes of some of the pages that were found, and of the state."""
    return found.num_bytes * num_pages / found.num_pages + found.state_bytes
