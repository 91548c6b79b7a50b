"""`write_page`: runs side by side as one page of pictures, for `--html`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ..report_page import ReportPage
from .result_file import Run
from .summary import Summary

Series = Mapping[str, Sequence[Run]]
"""Name of a system, or of a rate -> its runs."""

FIGURES: Final[Mapping[str, Callable[[Summary], float | None]]] = {
    "requests/s": lambda summary: summary.request_rate,
    "output tok/s": lambda summary: summary.output_tok_s if summary.vector_rate is None else None,
    "texts/s": lambda summary: summary.vector_rate,
    "TTFT median, ms": lambda summary: summary.ttft_ms.median if summary.vector_rate is None else None,
    "TTFT P99, ms": lambda summary: summary.ttft_ms.p99 if summary.vector_rate is None else None,
    "TPOT median, ms": lambda summary: summary.tpot_ms.median,
    "E2E P99, ms": lambda summary: summary.e2e_ms.p99,
}
"""Figure of a run -> how it is read; None: not measured."""


def write_page(path: Path, title: str, series: Series, curves: Series, *, notes: Sequence[str] = ()) -> None:
    """Write the page.

    Args:
        series: has a distribution and a column of figures each.
        curves: has a curve over the offered rate each, if its runs have several rates.
        notes: sentences below the title.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = ReportPage(title, notes=notes)
    for name, x, y, figure in (
        ("Throughput over the offered rate", "requests/s offered", "output tok/s", "output tok/s"),
        ("Time to first token over the offered rate", "requests/s offered", "P99, ms", "TTFT P99, ms"),
        ("Time per token over the offered rate", "requests/s offered", "median, ms", "TPOT median, ms"),
    ):
        lines = {system: _points(runs, FIGURES[figure]) for system, runs in curves.items()}
        page.lines(name, {system: points for system, points in lines.items() if len(points) > 1}, x, y)
    for name, field in (
        ("Time to first token", "ttft_s"),
        ("Time per output token", "tpot_s"),
        ("Time to the end", "e2e_s"),
    ):
        page.distribution(name, {each: _values_ms(runs, field) for each, runs in series.items()}, unit="ms")
    page.bars(
        "Output over the whole run",
        {each: _mean(runs, FIGURES["output tok/s"]) or 0.0 for each, runs in series.items()},
        "tok/s",
    )
    rows = [
        [
            name,
            *("-" if (value := _mean(runs, read)) is None else f"{value:,.2f}" for runs in series.values()),
        ]
        for name, read in FIGURES.items()
    ]
    page.table(["", *series], [row for row in rows if set(row[1:]) != {"-"}])
    page.write(path)


def offered_rate(run: Run) -> float:
    """Requests per second that the run offered; infinity: all at once."""
    return float(run.client.get("request_rate", "inf"))


def _points(runs: Sequence[Run], read: Callable[[Summary], float | None]) -> list[tuple[float, float]]:
    """(rate, mean figure of the runs with it), by rate; without the rate infinity, which has no place on an axis."""
    rates = sorted({offered_rate(run) for run in runs} - {float("inf")})
    means = [(rate, _mean([run for run in runs if offered_rate(run) == rate], read)) for rate in rates]
    return [(rate, mean) for rate, mean in means if mean is not None]


def _mean(runs: Sequence[Run], read: Callable[[Summary], float | None]) -> float | None:
    values = [value for run in runs if (value := read(run.summary)) is not None]
    return sum(values) / len(values) if values else None


def _values_ms(runs: Sequence[Run], field: str) -> list[float]:
    values = (getattr(row, field) for run in runs for row in run.requests)
    return [value * 1e3 for value in values if value is not None]
