"""`Measurements`: a simulation's data about each request and each step; 60 bytes per request."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

_NUMBER: Final = re.compile(r"[0-9][0-9,.]*")
FloatArray = npt.NDArray[np.float64]


class GapHistogram:
    """Gaps between tokens by size, in buckets 1 % wide: percentiles of a billion gaps need constant memory."""

    LEAST_S: Final = 1e-6
    GROWTH: Final = 0.01
    NUM_BUCKETS: Final = 2400  # up to 26 s · 10^3
    _FLUSH_AT: Final = 1 << 16

    def __init__(self) -> None:
        self._counts = np.zeros(self.NUM_BUCKETS, dtype=np.int64)
        self._pending: list[FloatArray] = []
        self._num_pending = 0
        self._sum_s = 0.0

    def add(self, gaps_s: FloatArray) -> None:
        """Count gaps; the array is kept temporarily and must not change."""
        self._pending.append(gaps_s)
        self._num_pending += len(gaps_s)
        if self._num_pending > self._FLUSH_AT:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        gaps_s = np.concatenate(self._pending)
        self._pending, self._num_pending = [], 0
        self._sum_s += float(gaps_s.sum())
        buckets = np.log(np.maximum(gaps_s, self.LEAST_S) / self.LEAST_S) / math.log1p(self.GROWTH)
        indices = np.minimum(buckets.astype(np.int64), self.NUM_BUCKETS - 1)
        self._counts += np.bincount(indices, minlength=self.NUM_BUCKETS)

    @property
    def count(self) -> int:
        """Number of gaps."""
        self._flush()
        return int(self._counts.sum())

    @property
    def mean_s(self) -> float:
        """Their exact mean."""
        return self._sum_s / self.count if self.count else 0.0

    def percentile_s(self, percent: float) -> float:
        """The middle of the bucket that contains the percentile."""
        total = self.count
        if not total:
            return 0.0
        idx = int(np.searchsorted(np.cumsum(self._counts), total * percent / 100))
        return self.LEAST_S * math.pow(1 + self.GROWTH, min(idx, self.NUM_BUCKETS - 1) + 0.5)


class Measurements:
    """Figures of one simulation, all replicas together.

    Attributes:
        ttft_s, tpot_s, e2e_s, queue_s: of answered requests, in the order in which they finish. TPOT is NaN for one
            token.
        prompt_tokens, cached_tokens, output_tokens: sums over answered requests.
        retractions: how often requests lost their KV memory.
        num_failed: requests that were refused or ended with an error, by message without its numbers.
        first_failures: the first message of each, with its numbers.
        gaps: between tokens of one request.
        first_arrival_s, last_end_s: of the run.
        num_steps, busy_s: of all replicas.
        step_tokens, padded_tokens: tokens computed in steps, padding included; the padding among them.
        kv_use_s: share of KV memory that requests used, integrated over the time of steps.
        peak_kv_use: the largest share.
    """

    def __init__(self) -> None:
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        self.e2e_s = array("d")
        self.queue_s = array("d")
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.retractions = 0
        self.num_failed: Counter[str] = Counter()
        self.first_failures: dict[str, str] = {}
        self.gaps = GapHistogram()
        self.first_arrival_s = math.inf
        self.last_end_s = 0.0
        self.num_steps = 0
        self.busy_s = 0.0
        self.step_tokens = self.padded_tokens = 0
        self.kv_use_s = self.peak_kv_use = 0.0

    @property
    def num_answered(self) -> int:
        """Requests that received all their tokens."""
        return len(self.e2e_s)

    def step(self, step_s: float, tokens: int, padded_tokens: int, kv_use: float) -> None:
        """Record a planned step."""
        self.num_steps += 1
        self.busy_s += step_s
        self.step_tokens += tokens
        self.padded_tokens += padded_tokens
        self.kv_use_s += kv_use * step_s
        self.peak_kv_use = max(self.peak_kv_use, kv_use)

    def answered(
        self, *, arrival_s: float, start_s: float, first_s: float, end_s: float, output_len: int
    ) -> None:
        """Record a request that received its last token."""
        self.ttft_s.append(first_s - arrival_s)
        self.tpot_s.append((end_s - first_s) / (output_len - 1) if output_len > 1 else math.nan)
        self.e2e_s.append(end_s - arrival_s)
        self.queue_s.append(start_s - arrival_s)
        self.output_tokens += output_len
        self.last_end_s = max(self.last_end_s, end_s)

    def failed(self, message: str, now_s: float) -> None:
        """Record a request that ended in another way."""
        kind = _NUMBER.sub("n", message.partition(":")[0])
        self.num_failed[kind] += 1
        self.first_failures.setdefault(kind, message)
        self.last_end_s = max(self.last_end_s, now_s)
