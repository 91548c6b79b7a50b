"""`SocketDir`: the private directory of one engine's sockets, gone when the engine is.

The directory has mode 0700, so that only this user's processes reach the sockets. The supervisor removes it
at the end. One that was killed with SIGKILL cannot: the kernel drops its lock, and the next engine to start
sweeps up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .control import Endpoints, Role
from .errors import ConfigError

_PREFIX: Final = "engine-"
_LOCK_NAME: Final = "lock"
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
            # Locked before it gets its name, so that no other engine ever sees it unlocked while we live.
            new = self.path / "new"
            self._lock_fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK_NAME)
        except OSError as error:
            raise ConfigError(
                f"no directory for sockets can be made in {tempfile.gettempdir()}: {error}"
            ) from error
        if len(os.fsencode(self.path / max(Role, key=len))) + len(".sock") > _MAX_SOCKET_PATH_BYTES:
            self.remove()
            raise ConfigError(
                f"the path {self.path} is too long for sockets: with a name it must fit into "
                f"{_MAX_SOCKET_PATH_BYTES} bytes; set TMPDIR to a shorter directory"
            )
        _remove_abandoned(self.path.parent)

    def endpoints(self) -> Endpoints:
        """Where each room receives."""
        return Endpoints(**{role.value: f"ipc://{self.path / role.value}.sock" for role in Role})

    def remove(self) -> None:
        """Remove the directory with all sockets in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)

    def __enter__(self) -> SocketDir:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.remove()


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories in `parent` whose engine died without doing so: their lock can be had."""
    for path in _own_dirs(parent):
        # One without a lock file is being made at this moment, or is not ours: leave it.
        with contextlib.suppress(OSError):
            lock_fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock_fd)


def _own_dirs(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and status.st_mode & 0o077 == 0:
                    yield Path(entry.path)
