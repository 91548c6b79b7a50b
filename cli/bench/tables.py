"""Tables of a summary and a comparison, which fit 80 columns, and plain sentences below them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ...runtime.text import counted
from ..console import framed_table, output_console
from ..report_page import check_writable
from .compare import MIN_RUNS_FOR_T_INTERVAL, compare, differences
from .page import FIGURES, offered_rate, write_page
from .result_file import Run, read_results
from .summary import Distribution, Summary


def print_summary(console: Console, summary: Summary, title: str) -> None:
    """Print every figure of a run; of one without a success, only why."""
    if summary.completed == 0:
        console.print(f"{title}: none of {counted(summary.failed, 'request')} succeeded", markup=False)
        _print_failures(console, summary)
        return
    table = framed_table(console, title=title, show_header=False, title_justify="left", min_width=60)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _rows(summary):
        table.add_row(name, value)
    console.print(table)
    latencies = framed_table(console, title="latency in milliseconds", title_justify="left", min_width=60)
    for column in ("", "mean", "median", "P90", "P99", "max"):
        latencies.add_column(column, justify="right" if column else "left")
    of_tokens = (("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms), ("ITL", summary.itl_ms))
    for name, distribution in (*(of_tokens if summary.vector_rate is None else ()), ("E2E", summary.e2e_ms)):
        latencies.add_row(name, *_latency_cells(distribution))
    console.print(latencies)
    _print_failures(console, summary)
    for warning in summary.warnings:
        console.print(f"note: {warning}", style="yellow", highlight=False, markup=False)


def _print_failures(console: Console, summary: Summary) -> None:
    for reason, count in summary.failures.items():
        console.print(f"failed {count}x: {reason}", style="red", highlight=False, markup=False)


def print_sweep(runs: Sequence[Run]) -> None:
    """Print the figures of several rates side by side."""
    console = output_console()
    table = framed_table(console, title="by offered rate", title_justify="left")
    for column in ("offered, req/s", *FIGURES, "failed"):
        table.add_column(column, justify="right")
    for run in runs:
        values = (read(run.summary) for read in FIGURES.values())
        cells = ("-" if value is None else f"{value:,.1f}" for value in values)
        table.add_row(f"{offered_rate(run):g}", *cells, str(run.summary.failed))
    console.print(table)


def print_comparison(path_a: Path, path_b: Path, html: Path | None = None) -> None:
    """Compare two result files on standard output, and on a page.

    Raises:
        ConfigError: one of them cannot be read, or the page cannot be written.
    """
    if html is not None:
        check_writable(html)
    runs_a, runs_b = read_results(path_a).runs, read_results(path_b).runs
    comparisons = compare(runs_a, runs_b)
    console = output_console()
    table = framed_table(
        console,
        title=f"A = {path_a} ({counted(len(runs_a), 'run')}), B = {path_b} ({counted(len(runs_b), 'run')})",
        title_justify="left",
    )
    for column in ("", "A", "B", "B / A", "95 % interval"):
        table.add_column(column, justify="right" if column else "left")
    for row in comparisons:
        table.add_row(
            row.metric.name,
            f"{row.a:,.2f}",
            f"{row.b:,.2f}",
            f"{row.ratio:.3f}",
            f"{row.low:.3f} .. {row.high:.3f}",
        )
    console.print(table)
    for row in comparisons:
        console.print(row.verdict(), highlight=False, markup=False)
    notes = [f"the runs differ in {difference}" for difference in differences(runs_a, runs_b)]
    if any(not row.between_runs for row in comparisons):
        notes.append(
            f"intervals cover the scatter within runs only; {MIN_RUNS_FOR_T_INTERVAL} runs of each (--append) would "
            "cover the scatter between them"
        )
    for note in notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    if not comparisons:
        console.print("the files have no metric in common")
    if html is not None:
        name_a, name_b = (str(path) if path_a.name == path_b.name else path.stem for path in (path_a, path_b))
        sides = {f"A: {name_a}": runs_a, f"B: {name_b}": runs_b}
        said = [*(row.verdict() for row in comparisons), *(f"Note: {note}." for note in notes)]
        write_page(html, f"{name_a} against {name_b}", sides, sides, notes=said)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    if summary.vector_rate is not None:
        return [
            ("requests completed / failed", f"{summary.completed} / {summary.failed}"),
            ("duration", f"{summary.duration_s:.2f} s"),
            ("texts", f"{summary.num_vectors:,}"),
            ("tokens of texts", f"{summary.prompt_tokens:,}"),
            ("throughput", f"{summary.vector_rate:,.1f} texts/s"),
            ("", f"{summary.input_tok_s:,.1f} tok/s"),
            ("request throughput", f"{summary.request_rate:.2f} req/s"),
            *_load_rows(summary),
        ]
    rows = [
        ("requests completed / failed", f"{summary.completed} / {summary.failed}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("prompt tokens", f"{summary.prompt_tokens:,}"),
        ("  of these from the prefix cache", f"{summary.cached_tokens:,} ({summary.cached_share:.1%})"),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("request throughput", f"{summary.request_rate:.2f} req/s"),
        ("input throughput", f"{summary.input_tok_s:,.1f} tok/s"),
        ("output throughput", f"{summary.output_tok_s:,.1f} tok/s"),
        ("total throughput", f"{summary.total_tok_s:,.1f} tok/s"),
    ]
    if summary.valid_share is not None:
        rows.append(("answers that match the schema", f"{summary.valid_share:.1%}"))
    if summary.steady is not None:
        steady = summary.steady
        rows.append(
            (f"output, steady {steady.start_s:.1f}-{steady.end_s:.1f} s", f"{steady.output_tok_s:,.1f} tok/s")
        )
    return [*rows, *_load_rows(summary)]


def _load_rows(summary: Summary) -> list[tuple[str, str]]:
    """Quality of the server's answers, and delays of the client itself."""
    rows = [("concurrency mean / peak", f"{summary.mean_concurrency:.1f} / {summary.peak_concurrency}")]
    if summary.goodput_rate is not None:
        attained = ", ".join(f"{metric} {share:.1%}" for metric, share in summary.attainment.items())
        rows.append(("goodput", f"{summary.goodput_rate:.2f} req/s ({attained})"))
    rows.append(("client: event-loop lag P99", f"{summary.client_lag_p99_ms:.1f} ms"))
    if summary.client_cpu_share is not None:
        rows.append(("client: CPU", f"{summary.client_cpu_share:.2f} cores"))
    return rows


def _latency_cells(distribution: Distribution) -> list[str]:
    values = (distribution.mean, distribution.median, distribution.p90, distribution.p99, distribution.max)
    return ["-" if value is None else f"{value:,.2f}" for value in values]
