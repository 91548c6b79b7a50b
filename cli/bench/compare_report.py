"""How a comparison is printed: a table of ratios with their intervals, then one sentence per metric."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from .compare import MIN_RUNS_FOR_T_INTERVAL, compare, setting_differences
from .result_file import read_results


def print_comparison(path_a: Path, path_b: Path) -> None:
    """Compare two result files on standard output.

    Raises:
        ConfigError: one of them cannot be read.
    """
    runs_a, runs_b = read_results(path_a).runs, read_results(path_b).runs
    comparisons = compare(runs_a, runs_b)
    console = Console()
    table = Table(
        title=f"A = {path_a} ({len(runs_a)} runs), B = {path_b} ({len(runs_b)} runs)", title_justify="left"
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
    for difference in setting_differences(runs_a[0], runs_b[0]):
        console.print(f"note: the runs differ in {difference}", style="yellow", highlight=False, markup=False)
    if any(not row.between_runs for row in comparisons):
        console.print(
            f"note: intervals cover the scatter within runs only; {MIN_RUNS_FOR_T_INTERVAL} runs of each (--append) "
            "would cover the scatter between them",
            style="yellow",
            highlight=False,
            markup=False,
        )
    if not comparisons:
        console.print("the files have no metric in common")
