"""Where pages of requests lie that decode side by side: mostly behind each other, also when the cache is full."""

from __future__ import annotations

import numpy as np

from .harness import Harness


def share_of_neighbours(harness: Harness) -> float:
    """Of the pages that running requests own, how many lie behind the one before."""
    pool = harness.scheduler._parts.pool
    counts = []
    for row in np.flatnonzero(pool.num_pages):
        pages = pool.pages[row, pool.num_leased[row] : pool.num_pages[row]]
        counts += (np.diff(pages) == 1).tolist()
    return float(np.mean(counts))


def crowd(num_before: int) -> Harness:
    """A pool of 1,024 pages with six requests that decode in turn, after so many pairs of prompts."""
    harness = Harness(page_size=4, num_pages=1024, max_model_len=2048, eos=())
    for _ in range(num_before):
        harness.submit(prompt_len=600, max_new_tokens=40)
        harness.submit(prompt_len=600, max_new_tokens=40)
        harness.run_until_idle()
    for _ in range(6):
        harness.submit(prompt_len=30, max_new_tokens=200)
    for _ in range(150):
        harness.step()
    return harness


def test_in_a_fresh_pool():
    assert share_of_neighbours(crowd(0)) > 0.8


def test_when_all_memory_is_cached_prompts():
    harness = crowd(4)

    assert harness.scheduler.report(0.0).evicted_tokens_total > 0
    assert share_of_neighbours(harness) > 0.8
