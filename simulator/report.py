"""`Measurements` of each request and step of a simulation, 60 bytes per request, and the `Report` made of them.

TTFT is arrival to first token, queue time is arrival to the start of the prompt, E2E is arrival to last token; TPOT is
(E2E - TTFT) / (tokens - 1) of one request; ITL are the gaps between consecutive tokens of all requests. Goodput counts
the requests per second that meet every objective. Requests of the background class count in no latency, and in no rate
of requests.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ..scheduler.records.decision_log import PassRecord
from ..scheduler.records.verdict import AddReqResult

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
        num_background, background_tokens: answered requests of the background, and their tokens, which are also in
            `output_tokens`.
        retractions: how often requests lost their KV memory.
        num_failed: requests that were refused or ended with an error, by message without its numbers.
        first_failures: the first message of each, with its numbers.
        gaps: between tokens of one request.
        first_arrival_s, last_end_s: of the run.
        num_steps, busy_s: of all replicas.
        step_tokens, padded_tokens: tokens computed in steps, padding included; the padding among them.
        kv_use_s: share of KV memory that requests used, integrated over the time of steps.
        peak_kv_use: the largest share.
        num_passes, num_left_waiting: passes with a waiting request, and those that left one waiting.
    """

    def __init__(self) -> None:
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        self.e2e_s = array("d")
        self.queue_s = array("d")
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.num_background = self.background_tokens = 0
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
        self.num_passes = self.num_left_waiting = 0

    @property
    def num_answered(self) -> int:
        """Requests that received all their tokens."""
        return len(self.e2e_s)

    @property
    def num_finished(self) -> int:
        """Requests that ended in any way."""
        return self.num_answered + self.num_background + self.num_failed.total()

    def step(self, step_s: float, tokens: int, padded_tokens: int, kv_use: float) -> None:
        """Record a planned step."""
        self.num_steps += 1
        self.busy_s += step_s
        self.step_tokens += tokens
        self.padded_tokens += padded_tokens
        self.kv_use_s += kv_use * step_s
        self.peak_kv_use = max(self.peak_kv_use, kv_use)

    def queued(self, record: PassRecord) -> None:
        """Record whether a pass admitted all requests that waited."""
        if record.num_waiting:
            self.num_passes += 1
            self.num_left_waiting += bool(record.num_rest) or any(
                verdict.result is not AddReqResult.CONTINUE for verdict in record.verdicts
            )

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

    def background_answered(self, output_len: int, end_s: float) -> None:
        """Record a request of the background that received its last token."""
        self.num_background += 1
        self.background_tokens += output_len
        self.output_tokens += output_len
        self.last_end_s = max(self.last_end_s, end_s)

    def failed(self, message: str, now_s: float) -> None:
        """Record a request that ended in another way."""
        kind = _NUMBER.sub("n", message.partition(":")[0])
        self.num_failed[kind] += 1
        self.first_failures.setdefault(kind, message)
        self.last_end_s = max(self.last_end_s, now_s)


SLO_METRICS = ("ttft", "tpot", "e2el")


class Percentiles(msgspec.Struct, frozen=True):
    """Statistics of one latency, in milliseconds; 0 without measurements.

    Attributes:
        quantiles: of 0, 1, ... 100 %; empty without measurements.
    """

    mean: float
    p50: float
    p95: float
    p99: float
    quantiles: tuple[float, ...] = ()

    @classmethod
    def of(cls, values_s: FloatArray) -> Percentiles:
        """Percentiles of values in seconds; NaN is ignored."""
        values_s = values_s[~np.isnan(values_s)]
        if not values_s.size:
            return cls(0.0, 0.0, 0.0, 0.0)
        quantiles = tuple((np.percentile(values_s, range(101)) * 1e3).tolist())
        return cls(float(values_s.mean()) * 1e3, quantiles[50], quantiles[95], quantiles[99], quantiles)

    @classmethod
    def of_gaps(cls, gaps: GapHistogram) -> Percentiles:
        """Percentiles of the gaps between tokens, accurate to 1 %."""
        p50, p95, p99 = (gaps.percentile_s(percent) * 1e3 for percent in (50, 95, 99))
        return cls(gaps.mean_s * 1e3, p50, p95, p99)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Rates are per second of virtual time, from the first arrival to the last token.

    Attributes:
        name: of the simulation, for tables.
        num_requests: answered requests.
        failures: first message of a kind, with its figures -> number of requests that failed in this way.
        goodput: answered requests per second that meet all objectives; `request_rate` without objectives.
        slo_share: share of all requests that meet all objectives.
        busy_share: share of the replicas' time spent in steps.
        mean_kv_use: share of KV memory that requests used, over the time of steps; `peak_kv_use` the largest.
        cache_hit_share: share of the prompts' tokens that were in the prefix cache.
        retractions: how often running requests lost their KV memory.
        left_waiting_share: share of the passes with waiting requests that left one waiting; in the others the order of
            the queue has no effect.
        padding_share: share of padding in the tokens that steps computed.
        num_background, background_tokens: see `Measurements`.
    """

    name: str
    duration_s: float
    num_requests: int
    failures: dict[str, int]
    request_rate: float
    prompt_tok_s: float
    output_tok_s: float
    goodput: float
    slo_share: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    queue_ms: Percentiles
    num_steps: int
    busy_share: float
    mean_kv_use: float
    peak_kv_use: float
    cache_hit_share: float
    retractions: int
    left_waiting_share: float
    padding_share: float
    prompt_tokens: int
    output_tokens: int
    num_replicas: int
    num_background: int = 0
    background_tokens: int = 0


def make_report(
    measurements: Measurements, *, name: str, num_replicas: int, slo_ms: Mapping[str, float] | None = None
) -> Report:
    """All figures of a finished simulation.

    Args:
        slo_ms: objectives in milliseconds by metric of `SLO_METRICS`; a request of one token meets any TPOT.
    """
    num_answered, num_failed = measurements.num_answered, measurements.num_failed.total()
    duration_s = (
        max(measurements.last_end_s - measurements.first_arrival_s, 1e-9)
        if num_answered + measurements.num_background
        else 1e-9
    )
    columns = {"ttft": measurements.ttft_s, "tpot": measurements.tpot_s, "e2el": measurements.e2e_s}
    kept = np.ones(num_answered, dtype=np.bool_)
    for metric, limit_ms in (slo_ms or {}).items():
        kept &= ~(_array(columns[metric]) * 1e3 > limit_ms)  # a comparison with NaN is false
    num_kept = int(kept.sum())
    return Report(
        name=name,
        duration_s=duration_s,
        num_requests=num_answered,
        failures={
            measurements.first_failures[kind]: count for kind, count in measurements.num_failed.items()
        },
        request_rate=num_answered / duration_s,
        prompt_tok_s=measurements.prompt_tokens / duration_s,
        output_tok_s=measurements.output_tokens / duration_s,
        goodput=num_kept / duration_s,
        slo_share=num_kept / max(num_answered + num_failed, 1),
        ttft_ms=Percentiles.of(_array(measurements.ttft_s)),
        tpot_ms=Percentiles.of(_array(measurements.tpot_s)),
        itl_ms=Percentiles.of_gaps(measurements.gaps),
        e2e_ms=Percentiles.of(_array(measurements.e2e_s)),
        queue_ms=Percentiles.of(_array(measurements.queue_s)),
        num_steps=measurements.num_steps,
        busy_share=measurements.busy_s / (duration_s * num_replicas),
        mean_kv_use=measurements.kv_use_s / measurements.busy_s if measurements.busy_s else 0.0,
        peak_kv_use=measurements.peak_kv_use,
        cache_hit_share=measurements.cached_tokens / max(measurements.prompt_tokens, 1),
        retractions=measurements.retractions,
        left_waiting_share=measurements.num_left_waiting / max(measurements.num_passes, 1),
        padding_share=measurements.padded_tokens / max(measurements.step_tokens, 1),
        prompt_tokens=measurements.prompt_tokens,
        output_tokens=measurements.output_tokens,
        num_background=measurements.num_background,
        background_tokens=measurements.background_tokens,
        num_replicas=num_replicas,
    )


def _array(values: array[float]) -> FloatArray:
    return np.frombuffer(values, dtype=np.float64) if values else np.zeros(0)
