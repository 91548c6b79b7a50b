"""`SocketDir`: the private directory of one engine's sockets, with a `ServerRecord`; removed when the engine ends.

The directory has mode 0700, so that only this user's processes reach the sockets. The supervisor removes it at the end.
A supervisor that is killed with SIGKILL cannot: the kernel drops its lock, and the next engine to start removes the
directory. The parent directory is shared with other users, so only known files are removed: a directory belongs to an
engine if its lock file says so, and only files with the names of the lock, the sockets, the black box and images are
deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from ...runtime.errors import ConfigError
from .control import Endpoints, Role
from .crash_report import is_black_box

RECORD_NAMES: Final = ("server", "server.new")
"""See `server_record`; the second one becomes the first."""
_PREFIX: Final = "engine-sockets-"
_LOCK_NAME: Final = "lock"
_LOCK_TEXT: Final = (
    b"This directory holds the sockets of a running engine; a later one removes it if need be.\n"
)
_SOCKET_NAMES: Final = {
    role: f"{role.value}.sock" for role in (Role.SCHEDULER, Role.DETOKENIZER, Role.TOKENIZER_MANAGER)
}
_RANK_STORE_NAME: Final = "ranks"
_TRANSFER_NAME: Final = "kv_transfer.sock"
_RANK_SOCKET: Final = f"{Role.MODEL_RUNNER.value}_{{rank}}.sock"
_RANK_SOCKET_PATTERN: Final = re.compile(_RANK_SOCKET.format(rank=r"\d{1,4}"))
_IMAGE: Final = "image-{digest}"
_IMAGE_PATTERN: Final = re.compile(_IMAGE.format(digest=r"[0-9a-f]{64}(\.new)?"))
_LONGEST_NAME: Final = max(*_SOCKET_NAMES.values(), _RANK_SOCKET.format(rank=9999), key=len)
_MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of a Unix socket address, less the final zero


class SocketDir:
    """A new directory, locked by this process.

    Attributes:
        path: the directory.
    """

    def __init__(self) -> None:
        """Make the directory, and remove those of engines that were killed.

        Raises:
            ConfigError: the directory for temporary files cannot hold sockets.
        """
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            # The lock is taken before the file gets its name, so that no other engine sees it unlocked.
            new = self.path / "new"
            self._lock_fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            os.write(self._lock_fd, _LOCK_TEXT)
            new.rename(self.path / _LOCK_NAME)
        except OSError as error:
            raise ConfigError(
                f"no directory for sockets can be made in {tempfile.gettempdir()}: {error}"
            ) from error
        if len(os.fsencode(self.path / _LONGEST_NAME)) > _MAX_SOCKET_PATH_BYTES:
            self.remove()
            raise ConfigError(
                f"the path {self.path} is too long for sockets: with a name it must fit into "
                f"{_MAX_SOCKET_PATH_BYTES} bytes; set TMPDIR to a shorter directory"
            )
        for path in abandoned_dirs(self.path.parent):
            _remove(path)

    def endpoints(self, ranks: Iterable[int] = ()) -> Endpoints:
        """The addresses of all processes.

        Args:
            ranks: of the model runners that are separate processes on this machine.
        """
        return Endpoints(
            scheduler=self._address(Role.SCHEDULER),
            detokenizer=self._address(Role.DETOKENIZER),
            tokenizer_manager=self._address(Role.TOKENIZER_MANAGER),
            model_runners=tuple(f"ipc://{self.path / _RANK_SOCKET.format(rank=rank)}" for rank in ranks),
            rank_store=str(self.path / _RANK_STORE_NAME),
            black_box=str(self.path),
            kv_transfer=f"ipc://{self.path / _TRANSFER_NAME}",
            images=str(self.path),
        )

    def _address(self, role: Role) -> str:
        return f"ipc://{self.path / _SOCKET_NAMES[role]}"

    def forget_ranks(self) -> None:
        """Remove the file of a lost group of ranks, so that the next group does not read its addresses."""
        (self.path / _RANK_STORE_NAME).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory with all sockets in it."""
        _remove(self.path)
        os.close(self._lock_fd)

    def __enter__(self) -> SocketDir:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.remove()


def image_name(digest: bytes) -> str:
    """The name of the file with the tiles of an image; with `.new` while it is written."""
    return _IMAGE.format(digest=digest.hex())


def is_image_name(name: str) -> bool:
    """Whether a file has tiles of an image."""
    return _IMAGE_PATTERN.fullmatch(name) is not None


def abandoned_dirs(parent: Path) -> Iterator[Path]:
    """The directories in `parent` of engines that died without removing them. Their lock is free; it is held until the
    next directory is requested.
    """
    for path in _own_dirs(parent):
        # A directory without a lock file is being created right now, or is not an engine's: skip it.
        with contextlib.suppress(OSError):
            lock_fd = os.open(path / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(lock_fd, len(_LOCK_TEXT) + 1) == _LOCK_TEXT:
                    yield path
            finally:
                os.close(lock_fd)


def running_dirs(parent: Path) -> list[Path]:
    """The directories in `parent` of engines that run; those of engines that were killed are removed."""
    for path in abandoned_dirs(parent):
        _remove(path)
    return [path for path in _own_dirs(parent) if (path / _LOCK_NAME).exists()]


def _remove(path: Path) -> None:
    """Remove one of the engine's directories. If it holds other files, they and the directory stay."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if _is_ours(name):
                (path / name).unlink(missing_ok=True)
        (path / _LOCK_NAME).unlink(missing_ok=True)
        path.rmdir()


def _is_ours(name: str) -> bool:
    """Whether this is the name of a socket, of the file of the ranks, of the record, of the black box or an image."""
    own = (_RANK_STORE_NAME, _TRANSFER_NAME, *RECORD_NAMES, *_SOCKET_NAMES.values())
    known = name in own or is_black_box(name) or is_image_name(name)
    return known or _RANK_SOCKET_PATTERN.fullmatch(name) is not None


def _own_dirs(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and status.st_mode & 0o077 == 0:
                    yield Path(entry.path)


_SHARED_TMP: Final = Path("/tmp")


class ServerRecord(msgspec.Struct, frozen=True):
    """Notes of a supervisor about its server in its private directory, for `engine ps` and `engine rm`.

    The lock of the directory says whether the server runs: no process id is trusted. Servers of this user are found
    that have the same directory for temporary files, or /tmp.

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
