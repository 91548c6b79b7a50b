"""`Report`: the figures of one simulation.

TTFT is arrival to first token, queue time is arrival to the start of the prompt, E2E is arrival to last token; TPOT is
(E2E - TTFT) / (tokens - 1) of one request; ITL are the gaps between consecutive tokens of all requests. Goodput counts
the requests per second that meet every objective.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec
import numpy as np

from .measurements import FloatArray, GapHistogram, Measurements

SLO_METRICS = ("ttft", "tpot", "e2el")


class Percentiles(msgspec.Struct, frozen=True):
    """Of one latency, in milliseconds; 0 without measurements."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values_s: FloatArray) -> Percentiles:
        """Percentiles of values in seconds; NaN is ignored."""
        values_s = values_s[~np.isnan(values_s)]
        if not values_s.size:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p95, p99 = (float(each) for each in np.percentile(values_s, [50, 95, 99]) * 1e3)
        return cls(float(values_s.mean()) * 1e3, p50, p95, p99)

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
        padding_share: share of padding in the tokens that steps computed.
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
    padding_share: float
    prompt_tokens: int
    output_tokens: int
    num_replicas: int


def make_report(
    measurements: Measurements, *, name: str, num_replicas: int, slo_ms: Mapping[str, float] | None = None
) -> Report:
    """All figures of a finished simulation.

    Args:
        slo_ms: objectives in milliseconds by metric of `SLO_METRICS`; a request of one token meets any TPOT.
    """
    num_answered, num_failed = measurements.num_answered, measurements.num_failed.total()
    duration_s = max(measurements.last_end_s - measurements.first_arrival_s, 1e-9) if num_answered else 1e-9
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
        padding_share=measurements.padded_tokens / max(measurements.step_tokens, 1),
        prompt_tokens=measurements.prompt_tokens,
        output_tokens=measurements.output_tokens,
        num_replicas=num_replicas,
    )


def _array(values: array[float]) -> FloatArray:
    return np.frombuffer(values, dtype=np.float64) if values else np.zeros(0)
