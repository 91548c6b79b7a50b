"""`WorkerList`: the file with the fleet's servers, in the form of smg's file discovery.

smg reads the file anew when it changes. It refuses the whole file for an unknown field, and takes the same `id` for the
same process. A file appears complete under its name, since it is renamed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from ...runtime.errors import ConfigError

_VERSION: Final = 1
_NEW: Final = ".new"


class ListedWorker(msgspec.Struct, frozen=True):
    """One server.

    Attributes:
        id: another one for each process, also at the same address.
        bootstrap_port: of a server that computes prompts only.
    """

    id: str
    url: str
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    model_id: str | None = None


class _Manifest(msgspec.Struct):
    version: int
    workers: list[ListedWorker]


class WorkerList:
    """The file; a context manager that begins and ends with an empty list."""

    def __init__(self, path: Path) -> None:
        """Take this path; a file that is there is replaced."""
        self.path = path
        self._written: list[ListedWorker] | None = None

    def __enter__(self) -> WorkerList:
        self.write([])
        return self

    def __exit__(self, *_exc_info: object) -> None:
        with contextlib.suppress(ConfigError):
            self.write([])

    def write(self, workers: list[ListedWorker]) -> None:
        """Replace the file, if the list is another one.

        Raises:
            ConfigError: it cannot be written.
        """
        if workers == self._written:
            return
        new = self.path.with_name(self.path.name + _NEW)
        try:
            new.write_bytes(
                msgspec.json.format(msgspec.json.encode(_Manifest(_VERSION, workers)), indent=1) + b"\n"
            )
            os.replace(new, self.path)
        except OSError as error:
            raise ConfigError(
                f"the list of workers cannot be written to {self.path}: {error.strerror}; name another file with "
                "--worker-list"
            ) from None
        self._written = list(workers)


class NoWorkerList:
    """No file is asked for."""

    def write(self, workers: list[ListedWorker]) -> None:
        """Do nothing."""
