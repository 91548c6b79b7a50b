"""`bench compare A B`: how much faster or slower B is, with 95 % confidence intervals and a plain verdict.

With three runs or more on each side, runs are the samples: a t-interval (Welch) on the logarithm of the ratio. With
fewer, the samples are the requests (and the blocks of the steady window) of the runs, resampled by bootstrap; that
covers the scatter within a run but not between runs, and the verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .result_file import Run

MIN_RUNS_FOR_T_INTERVAL = 3
MAX_CACHE_DIFFERENCE = 0.1
"""Largest difference between the shares of prompt tokens from the cache, of runs that can be compared."""
NUM_RESAMPLES = 4000
MAX_RESAMPLED_VALUES = 1 << 22  # drawn at once: 32 MB
CONFIDENCE = 0.95
# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom; 1.96 beyond.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

Samples = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure to compare.

    Attributes:
        name: as printed.
        higher_is_better: true for throughput, false for latency.
        of_run: the figure of a whole run, None if it was not measured.
        samples: what can be resampled within runs.
        statistic: from samples [..., n] to the figure [...].
    """

    name: str
    higher_is_better: bool
    of_run: Callable[[Run], float | None]
    samples: Callable[[Run], list[float]]
    statistic: Callable[[Samples], Samples]


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A for one metric; the ratio is B / A.

    Attributes:
        low, high: ends of the confidence interval of the ratio.
        between_runs: whether the interval covers the scatter between runs.
    """

    metric: Metric
    a: float
    b: float
    ratio: float
    low: float
    high: float
    between_runs: bool

    @property
    def different(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high

    def verdict(self) -> str:
        """One sentence."""
        change = (self.ratio - 1.0) * 100
        margin = max(self.high - self.ratio, self.ratio - self.low) * 100
        if not self.different:
            return f"{self.metric.name}: not different ({change:+.1f} % ± {margin:.1f} %)"
        better = (self.ratio > 1.0) == self.metric.higher_is_better
        return (
            f"{self.metric.name}: B is {abs(change):.1f} % ± {margin:.1f} % {'better' if better else 'worse'}"
        )


def _request_values(field: str) -> Callable[[Run], list[float]]:
    def values(run: Run) -> list[float]:
        return [value for row in run.requests if (value := getattr(row, field)) is not None]

    return values


def _steady_tok_s(run: Run) -> float | None:
    return run.summary.steady.output_tok_s if run.summary.steady is not None else None


def _blocks(run: Run) -> list[float]:
    return run.summary.steady.block_tok_s if run.summary.steady is not None else []


def _mean(samples: Samples) -> Samples:
    return np.asarray(samples.mean(axis=-1))


def _p99(samples: Samples) -> Samples:
    return np.asarray(np.percentile(samples, 99, axis=-1))


def _of_first_token(figure: str) -> Callable[[Run], float | None]:
    """Reader of a TTFT figure; vectors come in one piece, and have E2E only."""
    return lambda run: getattr(run.summary.ttft_ms, figure) if run.summary.vector_rate is None else None


METRICS = (
    Metric("output tok/s (steady)", True, _steady_tok_s, _blocks, _mean),
    Metric("TTFT mean", False, _of_first_token("mean"), _request_values("ttft_s"), _mean),
    Metric("TTFT P99", False, _of_first_token("p99"), _request_values("ttft_s"), _p99),
    Metric("TPOT mean", False, lambda r: r.summary.tpot_ms.mean, _request_values("tpot_s"), _mean),
    Metric("E2E mean", False, lambda r: r.summary.e2e_ms.mean, _request_values("e2e_s"), _mean),
    Metric("E2E P99", False, lambda r: r.summary.e2e_ms.p99, _request_values("e2e_s"), _p99),
)
WHOLE_RUN_THROUGHPUT = Metric(
    "output tok/s (whole run)", True, lambda r: r.summary.output_tok_s, lambda _: [], _mean
)
VECTOR_THROUGHPUT = Metric("texts/s (whole run)", True, lambda r: r.summary.vector_rate, lambda _: [], _mean)


def compare(runs_a: Sequence[Run], runs_b: Sequence[Run], seed: int = 0) -> list[Comparison]:
    """Every metric that both sides measured."""
    rng = np.random.default_rng(seed)
    found = (
        _compare_metric(metric, runs_a, runs_b, rng)
        for metric in (VECTOR_THROUGHPUT, WHOLE_RUN_THROUGHPUT, *METRICS)
    )
    return [comparison for comparison in found if comparison is not None]


def differences(runs_a: Sequence[Run], runs_b: Sequence[Run]) -> list[str]:
    """Differences beside the systems: settings of the client, and the state of the prefix cache.

    A run after another one with the same prompts finds them in the cache, unless it is flushed before.
    """
    found = setting_differences(runs_a[0], runs_b[0])
    shares = [[run.summary.cached_share for run in runs] for runs in (runs_a, runs_b)]
    low, high = (pick(map(pick, shares)) for pick in (min, max))
    if high - low > MAX_CACHE_DIFFERENCE:
        in_words = " / ".join(", ".join(f"{share:.0%}" for share in side) for side in shares)
        found.append(
            f"prompt tokens from the prefix cache: {in_words}; --flush-cache empties it before each run"
        )
    return found


def setting_differences(run_a: Run, run_b: Run) -> list[str]:
    """Settings of the client that differ; only runs of the same workload can be compared."""
    ignored = {"url", "output_file", "append", "details", "html", "sweep", "api_key"}
    keys = sorted((run_a.client.keys() | run_b.client.keys()) - ignored)
    return [
        f"{key}: {run_a.client.get(key)!r} / {run_b.client.get(key)!r}"
        for key in keys
        if run_a.client.get(key) != run_b.client.get(key)
    ]


def _compare_metric(
    metric: Metric, runs_a: Sequence[Run], runs_b: Sequence[Run], rng: np.random.Generator
) -> Comparison | None:
    values_a = [value for run in runs_a if (value := metric.of_run(run))]
    values_b = [value for run in runs_b if (value := metric.of_run(run))]
    if not values_a or not values_b:
        return None
    a, b = math.exp(float(np.mean(np.log(values_a)))), math.exp(float(np.mean(np.log(values_b))))
    if min(len(values_a), len(values_b)) >= MIN_RUNS_FOR_T_INTERVAL:
        low, high = _welch_interval(np.log(values_a), np.log(values_b))
        return Comparison(metric, a, b, b / a, low, high, between_runs=True)
    pools = [np.array([v for run in runs for v in metric.samples(run)]) for runs in (runs_a, runs_b)]
    if min(len(pool) for pool in pools) < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _resampled(metric, pools[1], rng) / _resampled(metric, pools[0], rng)
    if not np.isfinite(ratios).all():  # some samples are 0, such as blocks without a token in a short run
        return None
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = (float(q) for q in np.percentile(ratios, [tail, 100 - tail]))
    return Comparison(metric, a, b, b / a, low, high, between_runs=False)


def _resampled(metric: Metric, samples: Samples, rng: np.random.Generator) -> Samples:
    rows = max(1, MAX_RESAMPLED_VALUES // len(samples))
    counts = [min(rows, NUM_RESAMPLES - start) for start in range(0, NUM_RESAMPLES, rows)]
    draws = (samples[rng.integers(0, len(samples), size=(count, len(samples)))] for count in counts)
    return np.concatenate([metric.statistic(draw) for draw in draws])


def _welch_interval(logs_a: Samples, logs_b: Samples) -> tuple[float, float]:
    var_a, var_b = logs_a.var(ddof=1) / len(logs_a), logs_b.var(ddof=1) / len(logs_b)
    error = math.sqrt(var_a + var_b)
    center = float(logs_b.mean() - logs_a.mean())
    if error == 0.0:
        return math.exp(center), math.exp(center)
    freedom = (var_a + var_b) ** 2 / (var_a**2 / (len(logs_a) - 1) + var_b**2 / (len(logs_b) - 1))
    index = max(1, math.floor(freedom))
    quantile = T_QUANTILES[index - 1] if index <= len(T_QUANTILES) else 1.96
    return math.exp(center - quantile * error), math.exp(center + quantile * error)
