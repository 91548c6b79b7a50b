"""`WorkerList`: the file with the fleet's servers that serve, in the form of smg's file discovery.

smg reads the file anew when it changes. It refuses the whole file for an unknown field, and takes the same `id` for the
same process. A file appears complete under its name, since it is renamed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from ...runtime.errors import ConfigError


class ListedWorker(msgspec.Struct, frozen=True):
    """One server; `id` is another one for each process, also at the same address."""

    id: str
    url: str
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    model_id: str | None = None


class WorkerList:
    """The file; a context manager that begins and ends with an empty list."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[ListedWorker] | None = None

    def __enter__(self) -> WorkerList:
        self.write([])
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._written = None  # another process may have written
        with contextlib.suppress(ConfigError):
            self.write([])

    def write(self, workers: list[ListedWorker]) -> None:
        """Replace the file, if the list is another one.

        Raises:
            ConfigError: it cannot be written.
        """
        if workers == self._written:
            return
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.write_bytes(
                msgspec.json.format(msgspec.json.encode({"version": 1, "workers": workers})) + b"\n"
            )
            os.replace(new, self.path)
        except OSError as error:
            raise ConfigError(
                f"the list of workers cannot be written to {self.path}: {error.strerror}; name another file with "
                "--worker-list"
            ) from None
        self._written = list(workers)
