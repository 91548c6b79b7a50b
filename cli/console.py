"""`output_console`: standard output for tables: frames and colors on a terminal, plain columns in a file or a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_FILE_COLUMNS: Final = 1000


def output_console() -> Console:
    """A console on standard output; in a file or a pipe without a limit on the width."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_COLUMNS)


def framed_table(console: Console, **options: Any) -> Table:
    """A table with its frame on a terminal, without one elsewhere: `grep` and `awk` read plain columns."""
    from rich.table import Table

    if console.is_terminal:
        return Table(**options)
    return Table(**{**options, "box": None, "min_width": None, "pad_edge": False, "title_style": ""})


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their header, left-aligned; an empty cell is "-"."""
    lines = [header, *([cell or "-" for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
