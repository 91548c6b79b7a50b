"""`StartupDisplay`: shows the progress of a start on standard error: a spinner with named steps, a download bar.

If standard error is no terminal, nothing is shown, except one line when a download begins: a download is
slow, and the line explains the wait in a log.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_MIB: Final = 1 << 20


class StartupDisplay:
    """A context manager around a start; `step` and `download` may be called from any thread.

    Attributes:
        steps: (name, seconds) of each step that is over.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.steps: list[tuple[str, float]] = []
        self._quiet = quiet
        self._lock = threading.Lock()
        self._name, self._began_s = "", 0.0
        self._bars: _Bars | None = None
        self._download_announced = False

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._quiet:
            self._bars = _Bars()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._end_step()
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def step(self, name: str) -> None:
        """Begin a step; the step before it ends."""
        with self._lock:
            self._end_step()
            self._name, self._began_s = name, time.monotonic()
            if self._bars is not None:
                self._bars.show_step(name)

    def download(self, done_bytes: int, total_bytes: int) -> None:
        """Show the progress of the download of model files."""
        with self._lock:
            if self._bars is not None:
                self._bars.show_download(done_bytes, total_bytes)
            elif not self._download_announced and not self._quiet:
                print(f"downloading the model, {total_bytes / _MIB:.0f} MiB", file=sys.stderr, flush=True)
            self._download_announced = True

    def summary(self) -> str:
        """The steps in their order: `model files 0.1 s, tokenizer 0.2 s`."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.steps)

    def _end_step(self) -> None:
        if self._name:
            self.steps.append((self._name, time.monotonic() - self._began_s))
            self._name = ""


class _Bars:
    """The display on a terminal: a spinner line, and a bar below it during a download. Both are removed at the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._steps = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True
        )
        self._spinner = self._steps.add_task("starting")
        self._columns = (
            TextColumn("downloading the model"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
        )
        self._console = console
        self._download: tuple[Progress, TaskID] | None = None
        self._steps.start()

    def show_step(self, name: str) -> None:
        self._end_download()
        self._steps.update(self._spinner, description=name)

    def show_download(self, done_bytes: int, total_bytes: int) -> None:
        from rich.progress import Progress

        if self._download is None:
            self._steps.stop()  # a terminal can show one live display at a time
            progress = Progress(*self._columns, console=self._console, transient=True)
            self._download = progress, progress.add_task("", total=total_bytes)
            progress.start()
        progress, task = self._download
        progress.update(task, completed=done_bytes)

    def stop(self) -> None:
        self._end_download()
        self._steps.stop()

    def _end_download(self) -> None:
        if self._download is not None:
            self._download[0].stop()
            self._download = None
            self._steps.start()
