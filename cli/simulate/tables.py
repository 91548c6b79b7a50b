"""Tables and the page of `engine simulate`: one report in full, several side by side; tables fit 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console

from ..console import framed_table
from ..report_page import ReportPage

if TYPE_CHECKING:
    from ...simulator.report import Report

LEAST_LEFT_WAITING: Final = 0.01
"""With a smaller share of passes that leave a request waiting, the order of the queue decides nothing."""


def print_report(console: Console, report: Report, title: str, *, has_slo: bool) -> None:
    """Every figure of one simulation."""
    table = framed_table(
        console, title=f"{title}, {report.name}", show_header=False, title_justify="left", min_width=60
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _rows(report, has_slo):
        table.add_row(name, value)
    console.print(table)
    latencies = framed_table(console, title="latency in milliseconds", title_justify="left", min_width=60)
    for column in ("", "mean", "P50", "P95", "P99"):
        latencies.add_column(column, justify="right" if column else "left")
    for name, each in (
        ("queue", report.queue_ms),
        ("TTFT", report.ttft_ms),
        ("TPOT", report.tpot_ms),
        ("ITL", report.itl_ms),
        ("E2E", report.e2e_ms),
    ):
        latencies.add_row(name, *(_ms(value) for value in (each.mean, each.p50, each.p95, each.p99)))
    console.print(latencies)
    _print_failures(console, [report])


def _rows(report: Report, has_slo: bool) -> list[tuple[str, str]]:
    rows = [
        ("requests answered", f"{report.num_requests:,}"),
        ("duration", f"{report.duration_s:,.2f} s"),
        ("request throughput", f"{report.request_rate:,.2f} req/s"),
        ("prompt throughput", f"{report.prompt_tok_s:,.1f} tok/s"),
        ("output throughput", f"{report.output_tok_s:,.1f} tok/s"),
        ("steps", f"{report.num_steps:,}"),
        ("replicas busy", f"{report.busy_share:.1%}"),
        ("KV memory in use, mean / peak", f"{report.mean_kv_use:.1%} / {report.peak_kv_use:.1%}"),
        ("prompt tokens from the prefix cache", f"{report.cache_hit_share:.1%}"),
        ("retractions", f"{report.retractions:,}"),
        ("computed tokens that were padding", f"{report.padding_share:.1%}"),
    ]
    if has_slo:
        rows.insert(3, ("goodput", f"{report.goodput:,.2f} req/s ({report.slo_share:.1%} in time)"))
    return rows


def print_comparison(console: Console, reports: Sequence[Report], title: str, *, has_slo: bool) -> None:
    """One row per simulation."""
    table = framed_table(console, title=f"{title} (latencies in ms)", title_justify="left")
    columns = ["policy", "req/s", "out tok/s"]
    columns += ["goodput"] if has_slo else []
    columns += ["TTFT P50", "P99", "TPOT P50", "P99", "E2E P50", "P99", "KV", "hits", "retr.", "padding"]
    for idx, column in enumerate(columns):
        table.add_column(column, justify="right" if idx else "left", no_wrap=True)
    for each in reports:
        cells = [each.name, f"{each.request_rate:,.2f}", f"{each.output_tok_s:,.0f}"]
        cells += [f"{each.goodput:,.2f}"] if has_slo else []
        for latency in (each.ttft_ms, each.tpot_ms, each.e2e_ms):
            cells += [_ms(latency.p50), _ms(latency.p99)]
        cells += [
            _percent(each.mean_kv_use),
            f"{each.cache_hit_share:.0%}",
            f"{each.retractions:,}",
            f"{each.padding_share:.0%}",
        ]
        table.add_row(*cells)
    console.print(table)
    note(
        console,
        "req/s: answered requests per second from the first arrival to the last token, so with few requests the end of "
        "the last answers lowers it; KV: mean share of KV memory that requests hold",
    )
    if line := idle_policies(reports):
        note(console, line, style="yellow")
    _print_failures(console, reports)


def idle_policies(reports: Sequence[Report]) -> str:
    """Sentence about the policies that had nothing to decide, since every pass emptied their queue; "" if none."""
    idle = [each.name for each in reports if each.left_waiting_share < LEAST_LEFT_WAITING]
    if len(idle) < 2:
        return ""
    return (
        f"{', '.join(idle)}: the queue was empty after nearly every pass, so these policies had nothing to decide; "
        "raise --rate, or lower --max-running-requests or --max-total-tokens"
    )


def note(console: Console, text: str, style: str = "dim") -> None:
    """Print a sentence under a table; in a file it is one line."""
    console.print(text, highlight=False, markup=False, style=style, soft_wrap=not console.is_terminal)


def page_of(
    title: str, reports: Sequence[Report], notes: Sequence[str] = (), *, has_slo: bool = False
) -> ReportPage:
    """The reports side by side as a page of pictures; `has_slo`: there are objectives, so goodput has a meaning."""
    page = ReportPage(title, notes=notes)
    for name, latency in (
        ("Time to first token", "ttft_ms"),
        ("Time per output token of a request", "tpot_ms"),
        ("Time in the queue", "queue_ms"),
        ("Time to the last token", "e2e_ms"),
    ):
        page.distribution(name, {each.name: getattr(each, latency).quantiles for each in reports})
    page.bars("Output throughput", {each.name: each.output_tok_s for each in reports}, "tok/s")
    page.bars("Answered requests", {each.name: each.request_rate for each in reports}, "requests/s")
    rows = [_rows(each, has_slo) for each in reports]
    rows = [[*row, *_latency_rows(each)] for row, each in zip(rows, reports, strict=True)]
    cells = [[name, *(row[idx][1] for row in rows)] for idx, (name, _) in enumerate(rows[0])]
    page.table(["", *(each.name for each in reports)], cells)
    return page


def _latency_rows(report: Report) -> list[tuple[str, str]]:
    latencies = (
        ("TTFT", report.ttft_ms),
        ("TPOT", report.tpot_ms),
        ("ITL", report.itl_ms),
        ("E2E", report.e2e_ms),
    )
    return [
        (f"{name} {figure.upper()}, ms", _ms(getattr(each, figure)))
        for name, each in latencies
        for figure in ("p50", "p95", "p99")
    ]


def _print_failures(console: Console, reports: Sequence[Report]) -> None:
    for report in reports:
        for reason, count in report.failures.items():
            first = "" if count == 1 else "; the first"
            text = f"{report.name}: {count:,} not answered{first}: {reason}"
            console.print(text, style="red", highlight=False, markup=False)


def _percent(share: float) -> str:
    """A share with a digit after the point where it is small: a memory in use is never 0 %."""
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
