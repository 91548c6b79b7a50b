"""`progress_of`: a bar of finished texts on standard error, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_of(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields what is called with the number of texts that have just been finished."""
    if quiet or not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda num_texts: progress.advance(task, num_texts)


def _ignore(num_texts: int) -> None:
    return
