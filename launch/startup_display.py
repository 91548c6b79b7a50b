"""`StartupDisplay`: shows the progress of a start on standard error: a spinner with named steps, a download bar.

Where nothing can move (a log, a pipe, a notebook without widgets), only what takes long has lines: a download, and the
compilation of the kernels. `report_ready` notifies systemd (`Type=notify`) that clients can connect.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from ..models.hub.pull import DownloadState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)

COMPILE_STEP: Final = "compile the CPU kernels, once"
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


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


def report_ready(status: str) -> None:
    """Send READY to the service manager, if one waits for it; a manager that does not read is only logged.

    Args:
        status: one line, for `systemctl status`.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.connect(address)
            manager.send(f"READY=1\nSTATUS={status}\n".encode())
    except OSError as error:
        logger.warning("the service manager does not take the news of the start: %s", error)
