"""Where pages of requests lie that decode side by side: mostly behind each other, also when the cache is full."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.scheduler.harness import Harness


def share_of_neighbors(harness: Harness) -> float:
    """Of the pages of running requests, how many lie behind the one before. (No prompt has a cached prefix here.)"""
    pool = harness.scheduler._parts.memory.pool
    counts: list[bool] = []
    for row in np.flatnonzero(pool.num_pages):
        counts += (np.diff(pool.pages[row, : pool.num_pages[row]]) == 1).tolist()
    assert len(counts) > 50
    return float(np.mean(counts))


def make_harness(*, reads_in_order: bool = True, **settings: Any) -> Harness:
    """A pool of 1,024 pages of 4 tokens."""
    return Harness(
        page_size=4, num_pages=1024, max_model_len=2048, eos=(), reads_in_order=reads_in_order, **settings
    )


def fill_cache(harness: Harness) -> None:
    for _ in range(4):
        harness.submit(prompt_len=600, max_new_tokens=40)
        harness.submit(prompt_len=600, max_new_tokens=40)
        harness.run_until_idle()


def decode(harness: Harness) -> None:
    """Six requests side by side, of some 45 pages each by now."""
    for _ in range(6):
        harness.submit(prompt_len=30, max_new_tokens=200)
    for _ in range(150):
        harness.step()


def test_in_a_fresh_pool():
    harness = make_harness()

    decode(harness)

    assert share_of_neighbors(harness) > 0.8


def test_prompts_that_are_computed_chunk_by_chunk_in_turn():
    harness = make_harness(chunked_prefill_size=16, max_num_partial_prefills=4)
    for _ in range(4):
        harness.submit(prompt_len=150, max_new_tokens=80)
    for _ in range(60):
        harness.step()

    assert share_of_neighbors(harness) > 0.8


def test_requests_that_get_pages_for_drafts_too():
    harness = make_harness(speculative="ngram", speculative_num_draft_tokens=9)

    decode(harness)

    assert share_of_neighbors(harness) > 0.8


def test_when_all_memory_is_cached_prompts():
    harness = make_harness()
    fill_cache(harness)

    decode(harness)

    assert harness.scheduler.report(0.0).evicted_tokens_total > 0
    assert share_of_neighbors(harness) > 0.8


def test_pages_are_evicted_ahead_of_need_where_their_order_counts_and_only_there():
    most_free = {}
    for reads_in_order in (False, True):
        harness = make_harness(reads_in_order=reads_in_order)
        fill_cache(harness)
        for _ in range(6):
            harness.submit(prompt_len=30, max_new_tokens=200)
        for _ in range(20):  # until the cache fills what is free
            harness.step()
        most_free[reads_in_order] = 0
        for _ in range(100):
            harness.step()
            most_free[reads_in_order] = max(most_free[reads_in_order], harness.pages().free)

    assert most_free[False] == 0
    assert 0 < most_free[True] <= 1024 // 32
