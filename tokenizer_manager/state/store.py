"""`StateStore`: the database of `--state-dir`, for state that outlives the server: files, batches, responses.

    folder/           mode 0700
      lock            held with `flock` as long as the manager lives: two servers cannot share a folder
      state.sqlite    mode 0600, and its write-ahead log; only the tokenizer manager opens it
      files/          uploaded files

All calls run on one thread, in order. A caller passes a function of the connection, which uses the tables of
`tables.py` and is atomic: `await store.write(lambda db: FILES.delete(db, owner, id))`. The thread takes all waiting
changes into one transaction (group commit), each in its own savepoint, so that the failure of one leaves the others.
`durable=True` waits until the disk has the group (`synchronous=FULL`, measured at 8 ms): for creations and final
states. Without it (0.1 ms) a change survives the death of the process, and a power cut may undo it: for results that
are computed again.

A disk that is full, read-only or damaged makes a `StateError`, as does one that takes longer than `MAX_WAIT_S`.
Deleted content is overwritten (`secure_delete`), and the log that still has it is emptied when the store is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

from ...runtime.errors import ConfigError, RequestError
from .tables import MIGRATIONS, used_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]

MAX_WAIT_S: Final = 30.0
_APPLICATION_ID: Final = 0x656E6731  # "eng1"
_PAGE_BYTES: Final = 4096
_MAX_GROUP: Final = 512
_MAX_WAITING: Final = 8192
"""Calls that wait for a slow disk; further ones are refused."""
_BUSY_S: Final = 5.0
"""For another program to unlock the database, at the start."""
_IDLE_S: Final = 1.0
"""Time without calls after which the log is emptied."""
_BEFORE_DATABASE: Final = frozenset({"lock"})
"""Names in a folder without a database that a start before this one may have left."""
_ERRORS_OF_DISK: Final = {
    sqlite3.SQLITE_FULL: "the disk is full, or --state-max-gb is reached",
    sqlite3.SQLITE_READONLY: "the disk is read-only",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_CANTOPEN: "its files cannot be opened",
    sqlite3.SQLITE_BUSY: "another program has locked it",
    sqlite3.SQLITE_LOCKED: "another program has locked it",
    sqlite3.SQLITE_PERM: "its files may not be written",
    sqlite3.SQLITE_CORRUPT: "it is damaged; `engine` cannot repair it",
    sqlite3.SQLITE_NOTADB: "it is damaged; `engine` cannot repair it",
}


class StateError(RequestError):
    """The state cannot be read or written: 507 where there is no room, else 503."""


class _Call(NamedTuple):
    run: Change[Any]
    done: Future[Any]
    writes: bool
    durable: bool


class StateStore:
    """The opened database.

    Attributes:
        folder: of `--state-dir`.
        max_bytes: of all rows and files; an owner may have half of it.
    """

    def __init__(self, folder: Path, lock_fd: int, db: sqlite3.Connection, max_bytes: int) -> None:
        """Take an open database; see `open`."""
        self.folder = folder
        self.max_bytes = max_bytes
        self._lock_fd = lock_fd
        self._db = db
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="state", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, folder: str | Path, max_bytes: int) -> Self:
        """Open or create the state in a folder, and hold its lock.

        Raises:
            ConfigError: the folder is in use, is another user's or another program's, has the state of a newer
                version, or cannot be written.
        """
        path = Path(folder).expanduser().absolute()
        with contextlib.ExitStack() as stack:
            try:
                lock_fd = lock_folder(path)
            except OSError as error:
                raise ConfigError(f"state_dir is {path}, but it cannot be used: {error.strerror}") from None
            stack.callback(os.close, lock_fd)
            database = path / "state.sqlite"
            database.touch(mode=0o600)  # SQLite gives its log the same mode
            try:
                db = sqlite3.connect(database, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
                stack.callback(db.close)
                _prepare(db, path, max_bytes)
            except sqlite3.Error as error:
                raise ConfigError(f"state_dir is {path}, but its database cannot be used: {error}") from None
            stack.pop_all()
        return cls(path, lock_fd, db, max_bytes)

    async def read(self, query: Change[T]) -> T:
        """The result of a function that only reads; it sees every change that has been waited for.

        Raises:
            StateError: the disk fails.
        """
        return await _within_limit(self.submit(query, writes=False), MAX_WAIT_S)

    async def write(self, change: Change[T], *, durable: bool = False, waits: bool = False) -> T:
        """The result of a function that changes rows, once it is committed.

        A cancellation, such as that by a disconnect, does not undo it.

        Args:
            change: atomic; nothing of it remains if it raises.
            durable: it survives a power cut, too.
            waits: as long as it takes, and an error means that nothing has changed: for changes of files too.

        Raises:
            StateError: the disk fails; nothing has changed, unless it was too slow.
        """
        return await _within_limit(self.submit(change, durable=durable), None if waits else MAX_WAIT_S)

    def submit(self, run: Change[T], *, writes: bool = True, durable: bool = False) -> Future[T]:
        """As `write` and `read`, for other threads: the future of the result.

        Raises:
            StateError: too many calls wait.
        """
        if self._closed or self._calls.qsize() >= _MAX_WAITING:
            why = "it is closed" if self._closed else f"{_MAX_WAITING} calls wait for its disk"
            raise StateError(
                f"the state is not available: {why}; retry later", code="state_error", status=503
            )
        done: Future[T] = Future()
        self._calls.put(_Call(run, done, writes, durable))
        return done

    def check_room(self, db: sqlite3.Connection, owner: str, num_bytes: int) -> None:
        """Check that an owner may have this many bytes more.

        Raises:
            StateError: 507.
        """
        for used, limit, whose in (
            (used_bytes(db, owner), self.max_bytes // 2, "yours"),
            (used_bytes(db), self.max_bytes, "all"),
        ):
            if used + num_bytes > limit:
                raise StateError(
                    f"{num_bytes:,} bytes more do not fit: files and results take {used:,} ({whose}) of {limit:,} "
                    f"bytes; delete some, or start the server with a larger --state-max-gb",
                    code="state_full",
                    status=507,
                )

    def close(self) -> None:
        """Complete the calls that wait, and release the folder."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self._thread.join(MAX_WAIT_S)

    # ------------------------------------------------------------ on the thread

    def _work(self) -> None:
        ends = has_log = False
        while not ends:
            try:
                calls = [self._calls.get(timeout=_IDLE_S if has_log else None)]
            except queue.Empty:
                self._empty_log()
                has_log = False
                continue
            with contextlib.suppress(queue.Empty):
                while len(calls) < _MAX_GROUP:
                    calls.append(self._calls.get_nowait())
            ends = None in calls
            group = [call for call in calls if call is not None and call.done.set_running_or_notify_cancel()]
            for call in group:
                if not call.writes:
                    _answer(call, self._result_of(call))
            changes = [call for call in group if call.writes]
            if changes:
                has_log = True
                self._commit(changes)
        self._empty_log()
        self._db.close()
        os.close(self._lock_fd)

    def _commit(self, changes: list[_Call]) -> None:
        """Run changes in one transaction, and answer them when it is committed."""
        durable = any(call.durable for call in changes)
        results: list[_Result] = []
        result = _Result()
        try:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            for call in changes:
                self._db.execute("SAVEPOINT change")
                result = self._result_of(call)
                if result.error is not None:  # fails if SQLite has rolled back the whole transaction
                    self._db.execute("ROLLBACK TO change")
                self._db.execute("RELEASE change")
                results.append(result)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            results = [_Result(error=result.error or _state_error(error))] * len(changes)
        for call, result in zip(changes, results, strict=True):
            _answer(call, result)

    def _result_of(self, call: _Call) -> _Result:
        try:
            return _Result(call.run(self._db))
        except sqlite3.Error as error:
            return _Result(error=_state_error(error))
        except Exception as error:  # the caller's own, such as a 404
            return _Result(error=error)

    def _empty_log(self) -> None:
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            logger.warning("the log of the state was not emptied: %s", error)


class _Result(NamedTuple):
    value: Any = None
    error: Exception | None = None


def _answer(call: _Call, result: _Result) -> None:
    if result.error is None:
        call.done.set_result(result.value)
    else:
        call.done.set_exception(result.error)


async def _within_limit(done: Future[T], limit_s: float | None) -> T:
    future = asyncio.wrap_future(done)
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(future)
    except TimeoutError:
        raise StateError(
            f"the state was not read or written within {limit_s:g} s, because its disk is slow; retry later",
            code="state_error",
            status=503,
        ) from None


def _state_error(error: sqlite3.Error) -> Exception:
    """The error for callers; an error of our own SQL stays as it is."""
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if (cause := _ERRORS_OF_DISK.get(kind)) is None:
        return error
    logger.warning("the state cannot be used: %s (%s)", cause, error)
    status = 507 if kind == sqlite3.SQLITE_FULL else 503
    return StateError(f"the state cannot be used: {cause}", code="state_error", status=status)


# ------------------------------------------------------------ opening


def lock_folder(path: Path) -> int:
    """Make the folder, check that it is ours, and lock it: the descriptor of the lock."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.geteuid():
        raise ConfigError(f"state_dir is {path}, but the folder belongs to another user; name one of yours")
    names = {entry.name for entry in path.iterdir()}
    if "state.sqlite" not in names and (others := sorted(names - _BEFORE_DATABASE)):
        raise ConfigError(
            f"state_dir is {path}, but the folder has other files, such as {others[0]!r}; name an empty or a new one"
        )
    path.chmod(0o700)
    lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        if not isinstance(error, BlockingIOError):
            raise
        raise ConfigError(
            f"state_dir is {path}, but another server uses it; stop that one, or name another folder"
        ) from None
    return lock_fd


def check_version(db: sqlite3.Connection, path: Path) -> int:
    """Take a database for this connection alone; the number of migrations that it has had.

    Raises:
        ConfigError: it is another program's, or of a newer version.
    """
    db.row_factory = sqlite3.Row
    # Exclusive: the lock is kept, so that no other program can block a commit, and no shared memory is mapped.
    for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "secure_delete = ON"):
        db.execute(f"PRAGMA {setting}").fetchall()
    [application], [version] = (
        db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    [num_tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != _APPLICATION_ID and num_tables:
        raise ConfigError(
            f"state_dir is {path}, but its state.sqlite belongs to another program; name another folder"
        )
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"state_dir is {path}, but a newer version of engine has written it (version {version}, this one knows "
            f"{len(MIGRATIONS)}); use that version, or another folder"
        )
    return int(version)


def _prepare(db: sqlite3.Connection, path: Path, max_bytes: int) -> None:
    """Bring a database to the version of this engine."""
    version = check_version(db, path)
    db.execute("PRAGMA synchronous = FULL")
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        db.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
    db.execute(f"PRAGMA max_page_count = {max(max_bytes // _PAGE_BYTES, 1024)}").fetchall()
