"""`BlockResidency`: how long pages stay in the prefix cache and how they are used there, of a sample, for `/metrics`.

The sample is one page of the pool in `SAMPLE_EVERY`, chosen by its id: no randomness, and no work where pages are
neither cached, reused nor evicted. The idea and the three figures are vLLM's (vllm:v1/core/kv_cache_metrics.py).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from ...runtime.scheduler_report import RESIDENCY_BUCKETS_S, HistogramCounts
from ..arrays import AnyIntArray

SAMPLE_EVERY: Final = 100
_FEW_PAGES: Final = 32
"""Up to so many, a loop is faster than numpy: a step of decodes evicts one or two."""


class BlockResidency:
    """Observes the sampled pages when they are evicted, and when a request reuses them.

    - lifetime: from the entry of a page into the prefix cache to its eviction.
    - idle_before_evict: from its last use, or its entry, to its eviction.
    - reuse_gap: from one use, or its entry, to the next use.
    """

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, float]] = {}  # page -> its entry, its last use
        self._lifetime, self._idle, self._gap = _Histogram(), _Histogram(), _Histogram()

    def entered(self, pages: AnyIntArray, now_s: float) -> None:
        """Pages were put into the prefix cache; what was known of them is about an earlier stay."""
        for page in _sampled(pages):
            self._times[page] = now_s, now_s

    def used(self, pages: AnyIntArray, now_s: float) -> None:
        """A request was admitted that begins with these pages."""
        for page in _sampled(pages):
            if (times := self._times.get(page)) is not None:
                entered_s, used_s = times
                self._gap.observe(now_s - used_s)
                self._times[page] = entered_s, now_s

    def evicted(self, pages: AnyIntArray, now_s: float) -> None:
        """Pages were taken from the prefix cache for another use."""
        for page in _sampled(pages):
            if (times := self._times.pop(page, None)) is not None:
                entered_s, used_s = times
                self._lifetime.observe(now_s - entered_s)
                self._idle.observe(now_s - used_s)

    @property
    def is_empty(self) -> bool:
        """Whether no cached page is in the sample."""
        return not self._times

    def figures(self) -> dict[str, HistogramCounts]:
        """The histograms by name."""
        return {
            "lifetime": self._lifetime.counts(),
            "idle_before_evict": self._idle.counts(),
            "reuse_gap": self._gap.counts(),
        }


class _Histogram:
    """Counts by bucket, and the sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(RESIDENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(RESIDENCY_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def counts(self) -> HistogramCounts:
        return HistogramCounts(tuple(self._counts), self._sum_s)


def _sampled(pages: AnyIntArray) -> list[int]:
    if len(pages) <= _FEW_PAGES:
        return [page for page in pages.tolist() if not page % SAMPLE_EVERY]
    found: list[int] = pages[pages % SAMPLE_EVERY == 0].tolist()
    return found
