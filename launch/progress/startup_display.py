"""`StartupDisplay`: shows the progress of a start on standard error: a spinner with named steps, a download bar.

Where nothing can move (a log, a pipe, a notebook without widgets), only what takes long has lines: a download, and the
compilation of the kernels.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ...models.hub.download_progress import DownloadState
from .download_view import DownloadBar, DownloadLines, shows_live
from .steps import COMPILE_STEP

if TYPE_CHECKING:
    from rich.progress import Progress


class StartupDisplay:
    """A context manager around a start; `step` and `download` may be called from any thread.

    Args:
        quiet: show nothing.
        only_slow: show downloads and compilation only, also in a terminal.

    Attributes:
        steps: (name, seconds) of each step that is over.
    """

    def __init__(self, *, quiet: bool = False, only_slow: bool = False) -> None:
        self.steps: list[tuple[str, float]] = []
        self._quiet = quiet
        self._only_slow = only_slow
        self._lock = threading.Lock()
        self._name, self._began_s = "", 0.0
        self._view: _Live | _Lines | None = None

    def __enter__(self) -> Self:
        if not self._quiet:
            self._view = _Live() if shows_live() else _Lines()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._end_step()
            if self._view is not None:
                self._view.stop()
                self._view = None

    def step(self, name: str) -> None:
        """Begin a step; the step before it ends."""
        with self._lock:
            self._end_step()
            self._name, self._began_s = name, time.monotonic()
            if self._view is None:
                return
            if self._only_slow and name != COMPILE_STEP:
                self._view.stop()
            else:
                self._view.show_step(name)

    def download(self, state: DownloadState) -> None:
        """Show the progress of the download of model files."""
        with self._lock:
            if self._view is not None:
                self._view.show_download(state)

    def summary(self) -> str:
        """The steps in their order: `model files 0.1 s, tokenizer 0.2 s`."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.steps)

    def _end_step(self) -> None:
        if self._name:
            self.steps.append((self._name, time.monotonic() - self._began_s))
            self._name = ""


class _Lines:
    """The display without a terminal."""

    def __init__(self) -> None:
        self._download = DownloadLines()

    def show_step(self, name: str) -> None:
        if name == COMPILE_STEP:
            sys.stderr.write(f"{name}; this takes some 20 s\n")
            sys.stderr.flush()

    def show_download(self, state: DownloadState) -> None:
        self._download.show(state)

    def stop(self) -> None:
        return


class _Live:
    """The display on a terminal: a spinner line, or a bar during a download. Both are removed at the end."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._steps: Progress | None = None
        self._download: DownloadBar | None = None

    def show_step(self, name: str) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.stop()  # a terminal can show one live display at a time
        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        if name == COMPILE_STEP:
            columns.append(TimeElapsedColumn())
        self._steps = Progress(*columns, console=self._console, transient=True)
        self._steps.add_task(name)
        self._steps.start()

    def show_download(self, state: DownloadState) -> None:
        if self._steps is not None:
            self.stop()
        if self._download is None:
            self._download = DownloadBar(self._console)
        self._download.show(state)

    def stop(self) -> None:
        if self._steps is not None:
            self._steps.stop()
            self._steps = None
        if self._download is not None:
            self._download.stop()
            self._download = None
