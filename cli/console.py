"""`output_console`: standard output for tables: frames and colors on a terminal, plain columns in a file or a pipe.

`late_progress`: a bar on standard error for work that turns out to be long.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_FILE_COLUMNS: Final = 1000
_BAR_AFTER_S: Final = 1.0


class OnProgress(Protocol):
    """Called with what is done, how much of it, and of how much in all; `total` 0: that is not known."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


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


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


@contextlib.contextmanager
def late_progress() -> Iterator[OnProgress]:
    """A bar on standard error, from the second in which the work is not yet done; none where that is no terminal."""
    from rich.console import Console

    # FORCE_COLOR makes rich take any file for a terminal.
    console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
    if not console.is_terminal:
        yield no_progress
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        bar = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        task = bar.add_task("", total=None)
        is_shown = is_over = False

        def show(what: str, done: int, total: int) -> None:
            nonlocal is_shown
            if not is_shown and not is_over and time.monotonic() - started_s >= _BAR_AFTER_S:
                stack.enter_context(bar)
                is_shown = True
            if is_shown:
                bar.update(task, description=what, completed=done, total=total or None)

        yield show
        is_over = True
