"""`print_table`: columns for a terminal, and for `awk`: no borders, no wrapping, one line per row."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their header, left-aligned; an empty cell is "-"."""
    lines = [header, *([cell or "-" for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
