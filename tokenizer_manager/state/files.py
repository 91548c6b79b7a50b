"""`StoredFiles`: the files of `--state-dir`: uploads and the results of batches.

A file is written beside its place under another name, synced and renamed, and only then gets its row; so a row has its
whole file, and a file without a row is left over from a crash, and removed at the next start.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from .store import StateError, StateStore
from .tables import FILES, Row

_PARTIAL: Final = ".partial-"
_PREFIX: Final = "file-"


class StoredFiles:
    """The files of one store."""

    def __init__(self, store: StateStore, wall_clock: Callable[[], float] = time.time) -> None:
        """Make the folder, and remove files that have no row.

        Args:
            store: open.
            wall_clock: Unix time.
        """
        self.store = store
        self._folder = store.folder / "files"
        self._wall_clock = wall_clock
        self._folder.mkdir(mode=0o700, exist_ok=True)
        rows = store.submit(lambda db: FILES.of_all_owners(db, "TRUE"), writes=False).result()
        known = {row["id"] for row in rows}
        for path in self._folder.iterdir():
            if path.name not in known and path.name.startswith((_PARTIAL, _PREFIX)):
                path.unlink()

    def now_s(self) -> int:
        """Unix time, as rows have it."""
        return int(self._wall_clock())

    def new(self) -> NewFile:
        """A file to write; enter it."""
        return NewFile(self._folder)

    def path(self, file_id: str) -> Path:
        """The place of a file that has a row."""
        return self._folder / file_id

    async def add(
        self, owner: str, file: NewFile, *, filename: str, purpose: str, expires_s: int | None
    ) -> Row:
        """Give a file that is synced a place and a row.

        Args:
            owner: of the file.
            file: `sync` has been called.
            filename, purpose: as the client names them.
            expires_s: Unix time at which it is deleted; None: never.

        Raises:
            StateError: there is no room for it.
        """

        def insert(db: sqlite3.Connection) -> Row:
            return self.insert(db, owner, file, filename=filename, purpose=purpose, expires_s=expires_s)

        try:
            return await self.store.write(insert, durable=True, waits=True)
        except StateError:
            self.path(file.id).unlink(missing_ok=True)
            raise

    def insert(
        self,
        db: sqlite3.Connection,
        owner: str,
        file: NewFile,
        *,
        filename: str,
        purpose: str,
        expires_s: int | None,
    ) -> Row:
        """As `add`, as a part of a change."""
        self.store.check_room(db, owner, file.num_bytes)
        file.move_to(self.path(file.id))
        FILES.insert(
            db,
            owner,
            file.id,
            self.now_s(),
            num_bytes=file.num_bytes,
            expires_s=expires_s,
            filename=filename,
            purpose=purpose,
        )
        row = FILES.get(db, owner, file.id)
        assert row is not None
        return row

    async def find(self, owner: str, file_id: str) -> Row | None:
        """The row of a file that the owner has, and that has not expired."""
        row = await self.store.read(lambda db: FILES.get(db, owner, file_id))
        return None if row is None or _has_expired(row, self.now_s()) else row

    async def delete(self, owner: str, file_id: str, check: Callable[[sqlite3.Connection], None]) -> bool:
        """Delete a file; False if the owner has none of this id.

        Args:
            owner, file_id: of the file.
            check: raises if it must stay.
        """

        def delete(db: sqlite3.Connection) -> bool:
            check(db)
            return FILES.delete(db, owner, file_id)

        if not await self.store.write(delete, durable=True):
            return False
        self.path(file_id).unlink(missing_ok=True)
        return True

    async def delete_expired(self, is_kept: Callable[[sqlite3.Connection, Row], bool]) -> None:
        """Delete the files whose time has come, except those that `is_kept`."""

        def delete(db: sqlite3.Connection) -> list[str]:
            rows = FILES.of_all_owners(db, "expires_s <= ?", self.now_s())
            rows = [row for row in rows if not is_kept(db, row)]
            for row in rows:
                FILES.delete(db, row["owner"], row["id"])
            return [row["id"] for row in rows]

        for file_id in await self.store.write(delete):
            self.path(file_id).unlink(missing_ok=True)


def _has_expired(row: Row, now_s: int) -> bool:
    return row["expires_s"] is not None and row["expires_s"] <= now_s


class NewFile:
    """A file that is being written. A context manager that removes it unless it was moved to its place.

    Attributes:
        id: of the file.
        num_bytes: written so far.
    """

    def __init__(self, folder: Path) -> None:
        self.id = f"{_PREFIX}{uuid.uuid4().hex}"
        self.num_bytes = 0
        self._path = folder / f"{_PARTIAL}{self.id}"
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append; blocks.

        Raises:
            StateError: the disk is full, or fails.
        """
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise _disk_error(error) from None
        self.num_bytes += len(data)

    def sync(self) -> None:
        """Wait until the disk has it; blocks.

        Raises:
            StateError: the disk fails.
        """
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise _disk_error(error) from None

    def move_to(self, path: Path) -> None:
        """Give it its place; for `StoredFiles`."""
        try:
            self._path.rename(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _disk_error(error) from None


def _disk_error(error: OSError) -> StateError:
    return StateError(
        f"the file cannot be stored: {error.strerror}; make room on the disk of --state-dir",
        code="state_error",
        status=507,
    )
