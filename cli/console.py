"""`output_console`: standard output for tables: frames and colors on a terminal, plain columns in a file or a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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
