"""`DownloadState`: what a download of model files reports to its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Event = Literal["begin", "part", "file", "note", "end"]


class DownloadState(NamedTuple):
    """One report.

    Attributes:
        event: "begin" and "end" of the download, "part" (more bytes), "file" (a file is complete and verified), "note"
            (a wait, a second attempt).
        model: the model's name.
        file: the file that the report is about; "" for the download as a whole.
        file_bytes: size of that file.
        done_bytes: of all files, with what was on the disk before.
        total_bytes: of all files.
        note: the text of a "note".
    """

    event: Event
    model: str
    done_bytes: int
    total_bytes: int
    file: str = ""
    file_bytes: int = 0
    note: str = ""


Progress = Callable[[DownloadState], None]
"""Called during a download, by one thread at a time, though not always by the caller's."""
