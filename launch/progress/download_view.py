"""`DownloadBar` and `DownloadLines`: show a download on standard error, as a bar or as one line per file."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from ...models.hub.download_progress import DownloadState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


class DownloadView(Protocol):
    """Shows the reports of a download."""

    def show(self, state: DownloadState) -> None:
        """One report."""

    def stop(self) -> None:
        """The download has ended, or failed."""


def shows_live() -> bool:
    """Whether standard error shows a bar that moves: a terminal, or a notebook that has widgets."""
    if sys.stderr.isatty():
        return True
    if "ipykernel" not in sys.modules or importlib.util.find_spec("ipywidgets") is None:
        return False
    from rich.console import Console

    return Console().is_jupyter


def size_text(num_bytes: int) -> str:
    """`1.20 GiB`, `89.0 MiB`, `2 KiB`, `519 B`."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    if num_bytes >= _MIB:
        return f"{num_bytes / _MIB:.1f} MiB"
    return f"{num_bytes / 1024:.0f} KiB" if num_bytes >= 1024 else f"{num_bytes} B"


class DownloadBar:
    """A bar with bytes, rate and time left; removed at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, state: DownloadState) -> None:
        if state.event == "note":
            self._console.print(state.note, style="dim", markup=False, highlight=False)
            return
        progress = self._progress or self._start()
        if self._task is None:
            self._task = progress.add_task(
                f"downloading {state.model}", total=state.total_bytes, completed=state.done_bytes
            )
        progress.update(self._task, completed=state.done_bytes, total=state.total_bytes)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task = None, None

    def _start(self) -> Progress:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        return self._progress


class DownloadLines:
    """One line at the begin, one per file, one at the end: for logs, pipes and notebooks without widgets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._before_bytes = -1

    def show(self, state: DownloadState) -> None:
        if state.event == "note":
            self._say(f"  {state.note}")
            return
        if self._before_bytes < 0:
            self._began_s, self._before_bytes = self._clock(), state.done_bytes
            there = f", of which {size_text(state.done_bytes)} are there" if state.done_bytes else ""
            self._say(f"downloading {state.model}: {size_text(state.total_bytes)}{there}")
        if state.event == "file":
            self._say(f"  {state.file}: {size_text(state.file_bytes)}")
        elif state.event == "end":
            seconds = max(self._clock() - self._began_s, 1e-3)
            new = state.done_bytes - self._before_bytes
            self._say(f"downloaded {size_text(new)} in {seconds:.1f} s, {size_text(round(new / seconds))}/s")

    def stop(self) -> None:
        self._before_bytes = -1

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
