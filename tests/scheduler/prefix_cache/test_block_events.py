"""Tests of `scheduler/prefix_cache/block_events.py`; `test_prefix_cache_properties.py` has random lives of a tree."""

from __future__ import annotations

import pytest

from engine.scheduler.prefix_cache.base import PrefixMatch, namespace_of, split_namespace
from engine.scheduler.prefix_cache.block_events import (
    MAX_REMOVED,
    AllBlocksCleared,
    BlockEvents,
    BlocksRemoved,
    BlocksStored,
    block_size_for,
)
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from tests.scheduler.prefix_cache.cached_pool import ids, pages


def put(cache: RadixCache, tokens: list[int], extra_key: str = "", first_page: int = 1) -> None:
    lease = cache.lock(extra_key, PrefixMatch())
    num_pages = len(tokens) // cache.page_size
    cache.extend(lease, ids(*tokens), pages(*range(first_page, first_page + num_pages)))
    cache.release(lease)


def make(block_size: int = 2, page_size: int = 2) -> tuple[RadixCache, BlockEvents]:
    blocks = BlockEvents(block_size)
    return RadixCache(page_size, blocks=blocks), blocks


def test_hashes_are_the_same_in_every_process_and_fit_into_signed_and_unsigned_integers():
    cache, blocks = make()
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 3, 4], namespace_of("", "adapter"), 11)

    plain, adapted = blocks.take()

    assert plain == BlocksStored([6784702701424236957, 7965023339107119606], None, ids(1, 2, 3, 4), "")
    assert isinstance(adapted, BlocksStored)
    assert (adapted.parent_hash, adapted.lora_id) == (None, "adapter")
    assert not set(adapted.hashes) & set(plain.hashes)
    assert all(0 <= block_hash < 2**63 for block_hash in (*plain.hashes, *adapted.hashes))


def test_a_fork_announces_only_what_is_new_after_its_parent():
    cache, blocks = make()
    put(cache, [1, 2, 3, 4, 5, 6])
    (first,) = blocks.take()
    put(cache, [1, 2, 3, 4, 7, 8], first_page=11)

    (second,) = blocks.take()

    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert second.parent_hash == first.hashes[1]
    assert second.token_ids == ids(7, 8)


def test_small_pages_are_announced_in_blocks_also_across_nodes():
    cache, blocks = make(block_size=4, page_size=1)
    put(cache, [1, 2, 3])
    assert blocks.take() == []
    put(cache, [1, 2, 3, 4, 5], first_page=11)  # a new node ends the block that the first one began
    put(cache, [1, 2, 9, 9], first_page=21)

    whole, fork = blocks.take()
    assert cache.evict(1).size == 1  # the least recent leaf's last page, which no block needs
    nothing = blocks.take()
    cache.evict(1)

    assert isinstance(whole, BlocksStored) and isinstance(fork, BlocksStored)
    assert (whole.parent_hash, whole.token_ids) == (None, ids(1, 2, 3, 4))
    assert (fork.parent_hash, fork.token_ids) == (None, ids(1, 2, 9, 9))
    assert nothing == []
    assert blocks.take() == [BlocksRemoved(whole.hashes)]


def test_salted_prefixes_are_private():
    cache, blocks = make()
    put(cache, [1, 2], namespace_of("secret", ""))
    put(cache, [1, 2, 3, 4], namespace_of("secret", "adapter"), 11)
    put(cache, [1, 2, 5, 6], namespace_of("secret", "adapter"), 21)  # a split, a child of a private node
    cache.evict(3)

    assert blocks.take() == []


def test_a_flush_says_that_all_is_gone_if_it_is():
    cache, blocks = make()
    put(cache, [1, 2])
    running = cache.lock("", PrefixMatch())
    cache.extend(running, ids(3, 4), pages(9))
    stored = blocks.take()[0]
    assert isinstance(stored, BlocksStored)

    cache.flush()
    partly = blocks.take()
    cache.release(running)
    cache.flush()

    assert partly == [BlocksRemoved(stored.hashes)]
    assert blocks.take() == [AllBlocksCleared()]


def test_removals_are_joined_up_to_a_limit():
    cache, blocks = make(block_size=1, page_size=1)
    put(cache, list(range(MAX_REMOVED + 10)))
    blocks.take()

    for _ in range(5):
        cache.evict(1)
    cache.evict(MAX_REMOVED + 5)

    counts = [len(event.hashes) for event in blocks.take() if isinstance(event, BlocksRemoved)]
    assert sum(counts) == MAX_REMOVED + 10
    assert max(counts) <= MAX_REMOVED
    assert len(counts) == 2  # the five were joined with what came next


def test_a_block_is_a_page_or_several_small_ones():
    assert [block_size_for(size) for size in (1, 2, 3, 8, 15, 16, 17, 64)] == [16, 16, 18, 16, 30, 16, 17, 64]


@pytest.mark.parametrize("salt", ["", "s", "1:a"])
@pytest.mark.parametrize("lora_id", ["", "a", "2:b"])
def test_a_namespace_can_be_taken_apart(salt, lora_id):
    assert split_namespace(namespace_of(salt, lora_id)) == (salt, lora_id)
