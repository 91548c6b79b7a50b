"""`RadixCache` against a model that keeps one record per page: leases, extensions, evictions and pins in any order.

The model is as simple as the rules: it evicts page by page, each time the unlocked page without a follower that is
unpinned before pinned, dead before others, and has the lowest rank. So every eviction is checked page for page, for
each policy. A consumer of the block events has exactly the blocks of the tree after each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.runtime.config.engine_config import EvictionPolicyName
from engine.scheduler.prefix_cache.base import Lease, Session, namespace_of, split_namespace
from engine.scheduler.prefix_cache.block_events import BlockEvents
from engine.scheduler.prefix_cache.eviction import EVICTION_RANKS
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from engine.scheduler.prefix_cache.radix_node import RadixNode, path_to_root
from tests.scheduler.prefix_cache.block_consumer import BlockConsumer
from tests.scheduler.prefix_cache.cached_pool import ids, pages
from tests.selection import examples

Prefix = tuple[str, tuple[int, ...]]

KEYS = st.sampled_from([namespace_of("", ""), namespace_of("", "adapter"), namespace_of("salt", "adapter")])
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=8)  # alike enough to meet
PRIORITIES = st.integers(-1, 2)
SOME = st.integers(0, 10**6)
SESSIONS = st.sampled_from(["", "a", "a", "b"])


@dataclass
class Page:
    """A cached page and how it was used; the fields that policies look at are named as in `RadixNode`."""

    number: int
    created: int
    priority: int
    last_access: int = 0
    num_uses: int = 0
    num_locks: int = 0
    is_dead: bool = False


@dataclass
class Holder:
    """A request with a lease."""

    lease: Lease
    key: str
    tokens: tuple[int, ...] = ()
    priority: int = 0
    path: list[Prefix] = field(default_factory=list)
    session: Session | None = None


class PrefixCacheMachine(RuleBasedStateMachine):
    """Everything that may happen to a cache; a subclass per policy."""

    policy_name: EvictionPolicyName = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(1)
        self.cached: dict[Prefix, Page] = {}

    @initialize(
        page_size=st.sampled_from([1, 1, 2, 3]),
        pages_per_block=st.sampled_from([1, 1, 2, 3]),
        quota=st.sampled_from([0, 3, 5, 7]),
        prompts=st.lists(st.tuples(KEYS, TOKENS, PRIORITIES, st.integers(0, 5)), min_size=3, max_size=8),
    )
    def start(
        self,
        page_size: int,
        pages_per_block: int,
        quota: int,
        prompts: list[tuple[str, list[int], int, int]],
    ) -> None:
        self.block_size = page_size * pages_per_block
        self.blocks, self.consumer = BlockEvents(self.block_size), BlockConsumer(self.block_size)
        self.rank: Any = EVICTION_RANKS[self.policy_name]
        self.cache = RadixCache(
            page_size,
            eviction=self.rank,
            max_pinned_pages=quota,
            max_evictions_remembered=5,
            blocks=self.blocks,
        )
        self.page_size, self.quota = page_size, quota
        self.pins: dict[Prefix, tuple[float, set[Prefix]]] = {}
        self.holders: list[Holder] = []
        self.ends: dict[str, set[Prefix]] = {}
        self.free: set[int] = set()
        self.num_made = self.clock = 0
        self.now_s = 0.0
        for key, tokens, priority, pin_len in prompts:  # an empty cache is quickly tested
            self.serve(key, tokens, priority)
            if pin_len:
                self.pin(key, tokens[:pin_len], 5)

    # ------------------------------------------------------------ the model

    def prefixes(self, key: str, tokens: list[int] | tuple[int, ...]) -> list[Prefix]:
        size = self.page_size
        return [(key, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def longest(self, key: str, tokens: list[int] | tuple[int, ...]) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(key, tokens):
            if prefix not in self.cached:
                break
            found.append(prefix)
        return found

    def pinned(self) -> set[Prefix]:
        return set().union(*(cover for _, cover in self.pins.values()))

    def lose(self, gone: list[Prefix]) -> None:
        for prefix in gone:
            self.free.add(self.cached.pop(prefix).number)
        for ends in self.ends.values():
            kept = {self.kept_part(end) for end in ends}
            ends.clear()
            ends.update(end for end in kept if end[1])
        self.pins = {
            key: (until_s, cover - set(gone))
            for key, (until_s, cover) in self.pins.items()
            if cover - set(gone)
        }

    def kept_part(self, prefix: Prefix) -> Prefix:
        """The longest beginning that is still cached."""
        while prefix[1] and prefix not in self.cached:
            prefix = (prefix[0], prefix[1][: -self.page_size])
        return prefix

    def bury(self, end: Prefix) -> int:
        """Make pages dead from an end up to one that something else covers; returns how many."""
        count = 0
        for prefix in reversed(self.prefixes(*end)):
            page = self.cached[prefix]
            following = [
                self.cached[key, tokens]
                for key, tokens in self.cached
                if (key, tokens[: -self.page_size]) == prefix
            ]
            covered = page.num_locks or any(prefix in ends for ends in self.ends.values())
            if covered or not all(each.is_dead for each in following):
                break
            page.is_dead = True
            count += 1
        return count

    def victims(self, count: int) -> list[Prefix]:
        """What evicting `count` pages must take, in order."""
        followers = dict.fromkeys(self.cached, 0)
        for key, tokens in self.cached:
            if len(tokens) > self.page_size:
                followers[key, tokens[: -self.page_size]] += 1
        pinned, gone = self.pinned(), list[Prefix]()
        for _ in range(count):
            leaves = [
                prefix
                for prefix, page in self.cached.items()
                if not (page.num_locks or followers[prefix]) and prefix not in gone
            ]
            if not leaves:
                break
            victim = min(
                leaves,
                key=lambda prefix: (
                    prefix in pinned,
                    prefix in pinned or not self.cached[prefix].is_dead,  # a pin makes them alike
                    self.rank(self.cached[prefix]),
                ),
            )
            gone.append(victim)
            if len(victim[1]) > self.page_size:
                followers[victim[0], victim[1][: -self.page_size]] -= 1
        return gone

    # ------------------------------------------------------------ what may happen

    @rule(key=KEYS, tokens=TOKENS, limit=st.integers(0, 12), priority=PRIORITIES, session=SESSIONS)
    def lock(self, key: str, tokens: list[int], limit: int, priority: int, session: str = "") -> None:
        match = self.cache.match(key, ids(*tokens), limit)
        unlocked = self.cache.unlocked_pages(match)
        before = self.cache.locked_pages
        path = self.longest(key, tokens)[:limit]
        assert match.num_pages == len(path)

        lease = self.cache.lock(key, match, priority)

        assert self.cache.locked_pages == before + unlocked
        holder = Holder(lease, key, tuple(tokens[: len(path) * self.page_size]), priority)
        if session:
            holder.session = self.cache.begin_turn(session, "tenant", "", self.now_s)
            self.ends.setdefault(session, set())
        self.hold(holder, path)
        self.holders.append(holder)

    def hold(self, holder: Holder, more: list[Prefix]) -> None:
        for prefix in more:
            page = self.cached[prefix]
            page.num_locks += 1
            page.num_uses += 1
            page.is_dead = False
            page.priority = max(page.priority, holder.priority)
        holder.path += more

    @precondition(lambda self: self.holders)
    @rule(which=SOME, tokens=TOKENS)
    def extend(self, which: int, tokens: list[int]) -> None:
        holder = self.holders[which % len(self.holders)]
        more = tuple(tokens[: len(tokens) // self.page_size * self.page_size])
        path = self.prefixes(holder.key, holder.tokens + more)[len(holder.path) :]
        own = [self.take_page() for _ in path]

        kept = self.cache.extend(holder.lease, ids(*more), pages(*own)).tolist()

        self.clock += 1
        for prefix, offered in zip(path, own, strict=True):
            page = self.cached.setdefault(prefix, Page(offered, self.clock, holder.priority))
            if page.number != offered:
                self.free.add(offered)  # somebody was faster
        assert kept == [self.cached[prefix].number for prefix in path]
        holder.tokens += more
        self.hold(holder, path)

    def take_page(self) -> int:
        if self.free:
            return self.free.pop()
        self.num_made += 1
        return self.num_made

    @rule(key=KEYS, tokens=TOKENS, priority=PRIORITIES, session=SESSIONS)
    def serve(self, key: str, tokens: list[int], priority: int, session: str = "") -> None:
        """A whole request at once."""
        self.lock(key, tokens, 12, priority, session)
        self.extend(-1, tokens[self.holders[-1].lease.num_pages * self.page_size :])
        self.release(-1)

    @precondition(lambda self: self.holders)
    @rule(which=SOME, once=st.booleans())
    def release(self, which: int, once: bool = False) -> None:
        holder = self.holders.pop(which % len(self.holders))
        self.cache.release(holder.lease, once=once, session=holder.session)
        self.let_go(holder, once)
        if holder.session is None or not holder.path:
            return
        if holder.session.closed:
            self.bury(holder.path[-1])
        else:
            self.ends[holder.session.key] -= set(holder.path)
            self.ends[holder.session.key].add(holder.path[-1])

    @rule(name=SESSIONS, close=st.booleans())
    def demote(self, name: str, close: bool) -> None:
        session = self.cache.session(name)
        assert (session is not None) == (name in self.ends)
        if session is None:
            return
        in_order = [self.prefix_at(each) for each in session.ends]
        assert set(in_order) == self.ends.pop(name)

        assert self.cache.demote(session, close=close) == sum(map(self.bury, in_order))

        if not close:
            self.ends[name] = set(in_order)

    def prefix_at(self, node: RadixNode) -> Prefix:
        *path, root = path_to_root(node)
        assert root.namespace is not None
        key = b"".join(each.key for each in reversed(path))
        return root.namespace, tuple(np.frombuffer(key, dtype=np.int32).tolist())

    def let_go(self, holder: Holder, once: bool = False) -> None:
        self.clock += 1
        for prefix in holder.path:
            page = self.cached[prefix]
            page.num_locks -= 1
            page.last_access = self.clock
            page.is_dead = once and page.num_uses == 1

    @precondition(lambda self: self.holders)
    @rule(which=SOME)
    def forget(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))

        dropped = self.cache.forget(holder.lease).tolist()

        self.let_go(holder)
        gone: list[Prefix] = []
        for prefix in reversed(holder.path):
            extended = any(
                key == prefix[0] and len(tokens) > len(prefix[1]) and tokens[: len(prefix[1])] == prefix[1]
                for key, tokens in set(self.cached) - set(gone)
            )
            if self.cached[prefix].num_locks or extended:
                break
            gone.append(prefix)
        assert sorted(dropped) == sorted(self.cached[prefix].number for prefix in gone)
        self.lose(gone)

    @rule(count=st.sampled_from([1, 1, 1, 2, 3, 0, 8]))
    def evict(self, count: int) -> None:
        evictable = self.cache.evictable_pages
        gone = self.victims(count)
        pinned = self.pinned()

        freed = self.cache.evict(count).tolist()

        assert sorted(freed) == sorted(self.cached[prefix].number for prefix in gone)
        assert len(freed) == min(count, evictable)
        self.lose(gone)
        if pinned & set(gone):  # then nothing else was left
            assert all(page.num_locks for prefix, page in self.cached.items() if prefix not in pinned)

    @rule()
    def flush(self) -> None:
        gone = [prefix for prefix, page in self.cached.items() if not page.num_locks]

        freed = self.cache.flush().tolist()

        assert sorted(freed) == sorted(self.cached[prefix].number for prefix in gone)
        self.lose(gone)

    @rule(key=KEYS, tokens=TOKENS, for_s=st.sampled_from([5, 5, 5, 1, 0, -1]))
    def pin(self, key: str, tokens: list[int], for_s: int) -> None:
        name = (key, tuple(tokens[: len(tokens) // self.page_size * self.page_size]))
        self.pins.pop(name, None)
        pinned, cover = self.pinned(), set[Prefix]()
        for prefix in self.longest(key, tokens):
            if prefix not in pinned and len(pinned | cover) == self.quota:
                break
            cover.add(prefix)
        if len(self.pins) >= self.quota:
            cover = set()

        assert self.cache.pin(key, ids(*tokens), self.now_s + for_s) == len(cover)

        if cover:
            self.pins[name] = (self.now_s + for_s, cover)

    @rule(key=KEYS, tokens=TOKENS)
    def unpin(self, key: str, tokens: list[int]) -> None:
        self.cache.unpin(key, ids(*tokens))
        self.pins.pop((key, tuple(tokens[: len(tokens) // self.page_size * self.page_size])), None)

    @rule(seconds=st.integers(0, 2))
    def time_goes_by(self, seconds: int) -> None:
        self.now_s += seconds
        self.cache.expire_pins(self.now_s)
        self.pins = {name: pin for name, pin in self.pins.items() if pin[0] > self.now_s}

    # ------------------------------------------------------------ what holds always

    def teardown(self) -> None:
        """Pins never reduce what can be freed."""
        gone = [prefix for prefix, page in self.cached.items() if not page.num_locks]

        freed = self.cache.evict(self.cache.evictable_pages).tolist()

        assert sorted(freed) == sorted(self.cached[prefix].number for prefix in gone)
        self.lose(gone)
        self.agrees()

    @invariant()
    def agrees(self) -> None:
        cache = self.cache
        assert cache.verify([holder.lease for holder in self.holders]) == []
        numbers = sorted(page.number for page in self.cached.values())
        assert sorted(cache.all_pages().tolist()) == numbers
        assert sorted([*numbers, *self.free]) == list(range(1, self.num_made + 1))
        num_locked = sum(page.num_locks > 0 for page in self.cached.values())
        assert (cache.locked_pages, cache.evictable_pages) == (num_locked, len(numbers) - num_locked)
        assert cache.pinned_pages == len(self.pinned()) <= self.quota
        for holder in self.holders:
            held = cache.pages_of(holder.lease).tolist()
            assert held == [self.cached[prefix].number for prefix in holder.path]
        self.consumer.apply(self.blocks.take())
        whole = [prefix for prefix in self.cached if len(prefix[1]) % self.block_size == 0]
        public = [(split_namespace(key), tokens) for key, tokens in whole if not split_namespace(key)[0]]
        known = sorted(self.consumer.known.values())
        assert known == sorted((lora_id, tokens) for (_, lora_id), tokens in public)
        assert self.blocks.hashes() == set(self.consumer.known)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("policy", get_args(EvictionPolicyName))
def test_agrees_with_a_record_per_page(policy: EvictionPolicyName) -> None:
    machine = type(f"{policy}Machine", (PrefixCacheMachine,), {"policy_name": policy})

    run_state_machine_as_test(machine, settings=settings(max_examples=examples(100), stateful_step_count=40))
