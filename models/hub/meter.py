"""`Meter`: counts the bytes of a download over its threads and reports them, at most ten times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from .download_progress import DownloadState, Event, Progress
from .listing import RepoFile

_INTERVAL_S: Final = 0.1


class Meter:
    """One download.

    Args:
        model: its name.
        total_bytes: of all files.
        done_bytes: of all files, before it begins.
        progress: receives the reports; None for none.
        clock: seconds.
    """

    def __init__(
        self,
        model: str,
        total_bytes: int,
        done_bytes: int,
        progress: Progress | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self._total_bytes, self._done_bytes = model, total_bytes, done_bytes
        self._progress = progress
        self._clock = clock
        self._lock = threading.Lock()
        self._reported_s = -_INTERVAL_S
        self._tell(DownloadState("begin", model, done_bytes, total_bytes))

    def advance(self, file: RepoFile, num_bytes: int) -> None:
        """More bytes of a file are on the disk; fewer if negative."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = self._clock()
            if now_s - self._reported_s < _INTERVAL_S:
                return
            self._reported_s = now_s
            self._tell(self._state("part", file))

    def file_done(self, file: RepoFile) -> None:
        """A file is complete and verified."""
        with self._lock:
            self._tell(self._state("file", file))

    def note(self, text: str, file: RepoFile | None = None) -> None:
        """Something that explains a delay."""
        with self._lock:
            self._tell(self._state("note", file)._replace(note=text))

    def end(self) -> None:
        """Everything is there."""
        with self._lock:
            self._tell(self._state("end", None))

    def _state(self, event: Event, file: RepoFile | None) -> DownloadState:
        state = DownloadState(event, self.model, self._done_bytes, self._total_bytes)
        return state if file is None else state._replace(file=file.path, file_bytes=file.size_bytes)

    def _tell(self, state: DownloadState) -> None:
        if self._progress is not None:
            self._progress(state)
