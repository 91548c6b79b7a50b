"""`ServerRecord`: what a supervisor notes about its server in its private directory, for `engine ps` and `engine rm`.

The lock of the directory says whether the server runs: no process id is trusted. Servers of this user are found that
have the same directory for temporary files, or /tmp.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from .socket_dir import RECORD_NAMES, running_dirs

_SHARED_TMP: Final = Path("/tmp")


class ServerRecord(msgspec.Struct, frozen=True):
    """A server.

    Attributes:
        pid: of the supervisor.
        model: its name in the API.
        path: of the model's files.
        url: where it listens; "" until it is ready.
        started_s: Unix time.
    """

    pid: int
    model: str
    path: str
    url: str
    started_s: float


def write_record(folder: Path, record: ServerRecord) -> None:
    """Write or replace the record; without effect if that fails: the server runs without it."""
    with contextlib.suppress(OSError):
        name, new = RECORD_NAMES
        (folder / new).write_bytes(msgspec.json.encode(record))
        os.replace(folder / new, folder / name)


def running_servers() -> list[ServerRecord]:
    """The servers of this user, oldest first; removes the directories of those that were killed."""
    records = []
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), _SHARED_TMP)):
        for folder in running_dirs(parent):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                records.append(
                    msgspec.json.decode((folder / RECORD_NAMES[0]).read_bytes(), type=ServerRecord)
                )
    return sorted(records, key=lambda record: record.started_s)
