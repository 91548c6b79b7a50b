"""Computes the figures of a run from its records: throughput, latency percentiles, goodput, the steady window.

Definitions: TTFT is sending to first token; E2E is sending to last token; TPOT is (E2E - TTFT) / (tokens - 1) of one
request; ITL are the single gaps of all requests. The steady window is the time between the first and the last moment
at which at least `STEADY_SHARE` of the peak number of requests was in flight, so it excludes ramp-up and ramp-down.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from ...runtime.errors import ConfigError
from .load import LoadRun, RequestRecord

STEADY_SHARE = 0.9
NUM_BLOCKS = 20  # of the steady window, for confidence intervals
SLO_METRICS = ("ttft", "tpot", "e2el")


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of one latency, in milliseconds; NaN is written as None where nothing was measured."""

    mean: float | None
    std: float | None
    median: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Distribution:
        """The distribution of values given in seconds."""
        if not len(values_s):
            return cls(None, None, None, None, None, None, None)
        ms = np.asarray(values_s) * 1e3
        p50, p90, p95, p99 = (float(p) for p in np.percentile(ms, [50, 90, 95, 99]))
        return cls(float(ms.mean()), float(ms.std()), p50, p90, p95, p99, float(ms.max()))


class SteadyWindow(msgspec.Struct, frozen=True):
    """Rates between ramp-up and ramp-down.

    Attributes:
        start_s, end_s: relative to the start of the run.
        output_tok_s: output tokens per second inside.
        block_tok_s: the same in equal blocks of the window, for confidence intervals.
    """

    start_s: float
    end_s: float
    output_tok_s: float
    block_tok_s: list[float]


class Summary(msgspec.Struct, frozen=True):
    """The figures of one run. Rates are per second of the whole run; latencies in milliseconds.

    `valid_share`: of all requests, those with an answer that matches the schema; None without `--structured`.
    `vector_rate`: texts per second of a run that asks for their vectors; None for other runs.
    """

    duration_s: float
    completed: int
    failed: int
    failures: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    cached_share: float
    request_rate: float
    input_tok_s: float
    output_tok_s: float
    total_tok_s: float
    mean_concurrency: float
    peak_concurrency: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    steady: SteadyWindow | None
    goodput_rate: float | None
    attainment: dict[str, float]
    client_cpu_share: float | None
    client_lag_p99_ms: float
    warnings: list[str]
    valid_share: float | None = None
    num_vectors: int = 0
    vector_rate: float | None = None


def parse_goodput(text: str | None) -> dict[str, float]:
    """Read `ttft:500 tpot:50` into limits in milliseconds.

    Raises:
        ConfigError: an unknown metric or a limit that is not a positive number.
    """
    limits: dict[str, float] = {}
    for item in (text or "").split():
        metric, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if metric not in SLO_METRICS or not limit > 0:
            raise ConfigError(
                f"--goodput has {item!r}, but it must be metric:milliseconds with a metric of {', '.join(SLO_METRICS)}"
            )
        limits[metric] = limit
    return limits


def summarize(run: LoadRun, slo_ms: dict[str, float]) -> Summary:
    """All figures of a run."""
    good = [record for record in run.records if record.ok]
    failures = Counter(record.error or "no token came" for record in run.records if not record.ok)
    duration_s = max(run.end_s - run.start_s, 1e-9)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    cached_tokens = sum(record.cached_tokens for record in good)
    itls_s = [gap for record in good for gap in record.itls_s()]
    peak, steady = _steady_window(good, run.start_s)
    met = {metric: [_meets(record, metric, limit) for record in good] for metric, limit in slo_ms.items()}
    num_all_met = sum(all(row) for row in zip(*met.values(), strict=True)) if met else 0
    return Summary(
        duration_s=duration_s,
        completed=len(good),
        failed=len(run.records) - len(good),
        failures=dict(failures),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        cached_share=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        request_rate=len(good) / duration_s,
        input_tok_s=prompt_tokens / duration_s,
        output_tok_s=output_tokens / duration_s,
        total_tok_s=(prompt_tokens + output_tokens) / duration_s,
        mean_concurrency=sum(record.e2e_s for record in good) / duration_s,
        peak_concurrency=peak,
        ttft_ms=Distribution.of([record.ttft_s for record in good]),
        tpot_ms=Distribution.of([tpot for record in good if (tpot := record.tpot_s) is not None]),
        itl_ms=Distribution.of(itls_s),
        e2e_ms=Distribution.of([record.e2e_s for record in good]),
        steady=steady,
        goodput_rate=num_all_met / duration_s if slo_ms else None,
        attainment={metric: sum(hits) / len(run.records) for metric, hits in met.items()},
        client_cpu_share=run.client_cpu_share,
        client_lag_p99_ms=run.client_lag_p99_s * 1e3,
        warnings=_warnings(run, good, itls_s),
        valid_share=_valid_share(run.records),
        num_vectors=(num_vectors := sum(record.num_vectors for record in good)),
        vector_rate=num_vectors / duration_s if num_vectors else None,
    )


def _valid_share(records: Sequence[RequestRecord]) -> float | None:
    if all(record.valid is None for record in records):
        return None
    return sum(record.valid is True for record in records) / len(records)


def _meets(record: RequestRecord, metric: str, limit_ms: float) -> bool:
    value_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2e_s}[metric]
    return value_s * 1e3 <= limit_ms


def _steady_window(good: Sequence[RequestRecord], origin_s: float) -> tuple[int, SteadyWindow | None]:
    """Peak number of requests in flight, and the steady window."""
    changes = sorted(
        [(record.sent_s, 1) for record in good] + [(record.arrivals[-1][0], -1) for record in good],
        key=lambda change: (change[0], change[1]),
    )
    in_flight, levels = 0, []
    for moment, change in changes:
        in_flight += change
        levels.append((moment, in_flight))
    peak = max((level for _, level in levels), default=0)
    busy = [i for i, (_, level) in enumerate(levels) if level >= STEADY_SHARE * peak]
    if not busy or busy[-1] + 1 >= len(levels):
        return peak, None
    start_s, end_s = levels[busy[0]][0], levels[busy[-1] + 1][0]
    if end_s <= start_s:
        return peak, None
    moments = np.array([moment for record in good for moment, _ in record.arrivals])
    counts = np.array([count for record in good for _, count in record.arrivals], dtype=float)
    tokens, _ = np.histogram(moments, bins=np.linspace(start_s, end_s, NUM_BLOCKS + 1), weights=counts)
    block_s = (end_s - start_s) / NUM_BLOCKS
    return peak, SteadyWindow(
        start_s=start_s - origin_s,
        end_s=end_s - origin_s,
        output_tok_s=float(tokens.sum()) / (end_s - start_s),
        block_tok_s=[float(count) / block_s for count in tokens],
    )


def _warnings(run: LoadRun, good: Sequence[RequestRecord], itls_s: Sequence[float]) -> list[str]:
    warnings = []
    if itls_s and run.client_lag_p99_s > 0.25 * float(np.median(itls_s)):
        warnings.append(
            f"the client's event loop woke up to {run.client_lag_p99_s * 1e3:.1f} ms late (P99): "
            "the tail latencies may include this lag"
        )
    if run.client_cpu_share is not None and run.client_cpu_share > 0.5:
        warnings.append(
            f"the client used {run.client_cpu_share:.2f} cores; latencies may include delays of the client"
        )
    late = [record.sent_s - record.due_s for record in run.records]
    if late and max(late) > 1.0 and any(record.due_s > run.start_s for record in run.records):
        warnings.append(
            f"requests were sent up to {max(late):.1f} s after they were due (--max-concurrency): not an open loop"
        )
    if any(not record.num_vectors and len(record.arrivals) * 2 < record.output_tokens for record in good):
        warnings.append("several tokens came in one piece: ITL is an average over the piece")
    return warnings
