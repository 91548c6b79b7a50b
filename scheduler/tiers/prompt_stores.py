"""`PromptStores`: which prompts are stored in a tier, and when, as `--kv-write` says.

- selective: what a second request uses at once, the rest while no request runs: so prompts that come once cost a busy
  engine nothing.
- through: each prompt at its end.
- evicted: prompts and answers when they are about to be evicted.

All of them store the rest when the engine stops. A lease keeps pages until `Stored`, and their state stays in its slot.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...runtime.config.engine_config import CacheConfig
from ...runtime.transport.kv_tiers import Stored, StorePages, TierCommand
from ..arrays import TOKEN_ID_BYTES
from ..memory.kv_memory import KVMemory
from ..memory.pages import IncomingPages
from ..prefix_cache.base import Lease, PrefixCache, split_namespace
from ..requests.req import Req

logger = logging.getLogger(__name__)

STORE_SHARE: Final = 16
"""Pages that are locked while they are stored are at most 1/16 of the pool, unless it is a single prompt."""
MAX_STORES_WAITING: Final = 64
AHEAD_SHARE: Final = 4
"""With `evicted`, 1/4 of the pool is free or stored: a prompt of this size is admitted, and nothing is lost."""
STORED_FIRST_SHARE: Final = 20
"""With `evicted`, of the 1/20 of the pool that is evicted next, the stored pages go first."""
KEPT_PROMPTS: Final = 128
"""The last prompts; those of them that are not stored yet are stored when there is time."""


class _Prompt(NamedTuple):
    """A prompt or its beginning: the namespace, and int32 bytes of whole pages."""

    namespace: str
    token_ids: bytes


@dataclass(slots=True)
class TierCounts:
    """Totals since the start; see `TierFigures`."""

    lookups: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    used_bytes: int = -1
    load_s: float = 0.0
    store_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    def note_error(self, kind: str, error: str) -> None:
        if error:
            if kind == "timeout" and not self.errors[kind]:  # the I/O thread has warned of all others
                logger.warning("the tier does not answer, requests go on without it: %s", error)
            self.errors[kind] += 1


class PromptStores:
    """See the module."""

    def __init__(
        self,
        cache: PrefixCache,
        kv: KVMemory,
        incoming: IncomingPages,
        counts: TierCounts,
        jobs: Iterator[int],
        commands: list[TierCommand],
        settings: CacheConfig,
        *,
        min_pages: int,
    ) -> None:
        """Take the parts.

        Args:
            counts, jobs, commands: of the tier: totals, the numbers of further jobs, and where commands go.
            min_pages: a shorter prompt is not stored.
        """
        self._cache = cache
        self._kv = kv
        self._incoming = incoming
        self._counts = counts
        self._jobs = jobs
        self._commands = commands
        self._min_pages = min_pages
        self._mode = settings.kv_write
        self._persists_salted = settings.kv_persist_salted
        self._ahead_pages = max(1, kv.num_pages // AHEAD_SHARE)
        self._looked_ahead = (-1, -1)  # the cache's generation and the free pages then
        self._has_states = kv.state_slots.num_checkpoints > 0
        self._page_bytes = kv.page_size * TOKEN_ID_BYTES
        self._stores: dict[int, tuple[Lease, int]] = {}  # by job; with the checkpoint at its end, or 0
        self._to_store: deque[_Prompt] = deque(maxlen=MAX_STORES_WAITING)
        self._prompts: OrderedDict[_Prompt, bool] = OrderedDict()  # the last ones; whether they are stored

    def __len__(self) -> int:
        """Stores without an answer."""
        return len(self._stores)

    def leases(self) -> list[Lease]:
        """The locks of the pages that are stored."""
        return [lease for lease, _ in self._stores.values()]

    def stored(self, message: Stored, *, is_idle: bool) -> None:
        """Take an answer, and order what has waited for it; `is_idle`: no request runs."""
        if message.job not in self._stores:
            return  # it has ended
        lease, checkpoint = self._stores.pop(message.job)
        if checkpoint:
            self._kv.state_slots.stored.remove(checkpoint)
        self._incoming.num_read -= lease.num_pages
        self._cache.release(lease)
        self._counts.stored_bytes += message.num_bytes
        self._counts.store_s += message.seconds
        self._counts.note_error("store", message.error)
        self.store_waiting()
        if is_idle:
            self.store_one_more()

    def forget(self) -> None:
        """Store nothing of what was computed until now."""
        self._to_store.clear()
        self._prompts.clear()
        self._cache.forget_stored()

    def close(self) -> None:
        """Order all that is not stored yet: the engine stops."""
        newest = [prompt for prompt, is_stored in reversed(self._prompts.items()) if not is_stored]
        for prompt in (*self._to_store, *newest):
            self._store(prompt)

    def note_prompt(self, req: Req) -> None:
        """A prompt is computed: queue the part that another request has used before, and remember the whole."""
        if req.in_memory or not self.may_persist(req.extra_key):
            return
        # A prompt is reused without its last token, and a state at its end is of no use for that. Where prompts part,
        # the state is kept only now.
        num_pages = (req.prompt_len - self._has_states) // self._kv.page_size
        used_pages = min(num_pages, max(req.cached_tokens, req.tree_len) // self._kv.page_size)
        if self._mode == "evicted":
            self._remember(req, num_pages, is_stored=False)
            return
        writes_through = self._mode == "through"
        if num_pages - used_pages >= self._min_pages or writes_through:
            self._remember(req, num_pages, is_stored=writes_through)
        if not req.loaded_tokens or req.tree_len > req.cached_tokens:  # else the disk has it
            self._remember(req, used_pages, is_stored=True)

    def _remember(self, req: Req, num_pages: int, *, is_stored: bool) -> None:
        prompt = _Prompt(req.extra_key, req.fill_ids[: num_pages * self._page_bytes])
        was_stored = self._prompts.pop(prompt, False)
        if num_pages < self._min_pages:
            return
        self._prompts[prompt] = is_stored or was_stored
        if is_stored and not was_stored:
            self._to_store.append(prompt)
        if len(self._prompts) > KEPT_PROMPTS:
            self._prompts.popitem(last=False)

    def store_waiting(self) -> None:
        """Order the stores that are queued, up to the first one that must wait."""
        most = self._kv.num_pages // STORE_SHARE
        while self._to_store:
            num_pages = min(self._kv.num_pages, len(self._to_store[0].token_ids) // self._page_bytes)
            if self._stores and self._incoming.num_read + num_pages > most:
                return
            self._store(self._to_store.popleft())

    def store_one_more(self) -> None:
        """No request runs: store the newest prompt that is not stored, one at a time."""
        while self._mode != "evicted" and not (self._stores or self._to_store):
            newest = next((each for each in reversed(self._prompts) if not self._prompts[each]), None)
            if newest is None:
                return
            self._prompts[newest] = True
            self._store(newest)

    def store_ahead(self) -> None:
        """With `evicted`, when few pages are free: store what is evicted next, answers included."""
        if self._mode != "evicted" or self._stores:
            return
        looked_ahead = self._cache.generation, self._kv.page_counts().free
        missing = self._ahead_pages - looked_ahead[1]
        if missing > 0 and looked_ahead != self._looked_ahead:
            self._looked_ahead = looked_ahead
            prefixes = self._cache.take_unstored(missing, self._min_pages)
            self._to_store += [_Prompt(*each) for each in prefixes if self.may_persist(each[0])]
            self.store_waiting()

    def may_persist(self, namespace: str) -> bool:
        """Whether prompts of a namespace may be looked up and stored: those with a cache salt are private."""
        return self._persists_salted or not split_namespace(namespace)[0]

    def _store(self, prompt: _Prompt) -> None:
        """Order the store of the part of a prompt that the prefix cache has; unless that is too short."""
        match = self._cache.match(prompt.namespace, prompt.token_ids, self._kv.num_pages)
        if match.num_pages < self._min_pages:
            return  # evicted, or its step has failed
        job = next(self._jobs)
        self._incoming.num_read += match.num_pages
        lease = self._cache.lock(prompt.namespace, match, is_use=False)
        self._stores[job] = lease, match.checkpoint
        if match.checkpoint:
            self._kv.state_slots.stored.append(match.checkpoint)
        token_ids = prompt.token_ids[: match.num_pages * self._page_bytes]
        pages = self._cache.pages_of(lease).tobytes()
        self._commands.append(StorePages(job, prompt.namespace, token_ids, 0, pages, match.checkpoint))
