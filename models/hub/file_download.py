"""`FileDownload`: one file of the hub into the cache: locked, resumed where an earlier attempt ended, and verified.

The beginning of a file stays on the disk after an interruption of any kind. A lock, the one that huggingface_hub takes,
keeps a second process from the same file; where a file system does not honor it, the checksum detects the mixture.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ...runtime.errors import ConfigError
from .hub_cache import HubCache
from .hub_client import HubClient, HubUnreachableError
from .listing import RepoFile
from .meter import Meter

if TYPE_CHECKING:
    from hashlib import _Hash

_LOCK_POLL_S: Final = 0.5
_LOCK_MODE: Final = 0o664  # as huggingface_hub: several users may share a cache
_BLOCK_BYTES: Final = 1 << 20
_MAX_IDLE_ATTEMPTS: Final = 5
"""Attempts in a row that bring no byte, after which a download fails."""
_BACKOFF_S: Final = 1.0
_MAX_BACKOFF_S: Final = 30.0


class StoppedError(Exception):
    """The download was told to stop."""


class FileDownload:
    """Downloads files of one commit.

    Args:
        client: of the hub.
        cache: of the repository.
        commit: of the files.
        meter: receives the progress.
        stop: set when the download must end; a blocked read ends with its timeout.
        sleep: waits for seconds, before another attempt.
    """

    def __init__(
        self,
        client: HubClient,
        cache: HubCache,
        commit: str,
        meter: Meter,
        stop: threading.Event,
        sleep: Callable[[float], None],
    ) -> None:
        self._client, self._cache, self._commit, self._meter = client, cache, commit, meter
        self._stop = stop
        self._sleep = sleep

    def fetch(self, file: RepoFile) -> None:
        """Bring a file into the cache, if it is not there, and link it into the snapshot.

        Raises:
            HubUnreachableError: the connection is lost again and again.
            ConfigError: the hub refuses the file, or its content is wrong twice.
            OSError: of the disk.
            StoppedError: see `stop`.
        """
        self._cache.blob(file).parent.mkdir(parents=True, exist_ok=True)
        with self._locked(file):
            if self._cache.has(file):  # another process was faster
                self._meter.advance(file, file.size_bytes - self._cache.part_bytes(file))
            else:
                self._fetch_verified(file)
        self._cache.link(self._commit, file)
        self._meter.file_done(file)

    def _fetch_verified(self, file: RepoFile) -> None:
        part = self._cache.part(file)
        found = ""
        for _ in range(2):
            digest = self._complete(file)
            if digest == file.blob:
                os.replace(part, self._cache.blob(file))
                return
            found = digest
            part.unlink()
            self._meter.advance(file, -file.size_bytes)
            self._meter.note(f"{file.path}: wrong checksum, downloading it again", file)
        raise ConfigError(
            f"{self._cache.repo}: {file.path} has the wrong checksum twice ({found}, published {file.blob}); a "
            "proxy or mirror changes it: check HF_ENDPOINT and HTTPS_PROXY, then pull again"
        )

    def _complete(self, file: RepoFile) -> str:
        """Append what is missing to the part; returns the checksum of all of it."""
        import httpx

        idle = 0
        with open(self._cache.part(file), "a+b", buffering=0) as part:
            have = part.seek(0, os.SEEK_END)
            if have > file.size_bytes:
                part.truncate(0)
                have = 0
            digest = self._digest_of(file, have)
            while have < file.size_bytes:
                before = have
                try:
                    with self._client.content(self._cache.repo, self._commit, file, have) as (begins, blocks):
                        if begins != have:  # the server cannot resume
                            self._meter.advance(file, -have)
                            part.truncate(0)
                            have = begins
                            digest = _new_digest(file)
                        for block in blocks:
                            self._check_stop()
                            block = block[: file.size_bytes - have]
                            part.write(block)
                            digest.update(block)
                            have += len(block)
                            self._meter.advance(file, len(block))
                            if have == file.size_bytes:
                                break
                    problem = "the connection ended early"
                except (httpx.TransportError, httpx.StreamError, HubUnreachableError) as error:
                    problem = str(error) or type(error).__name__
                if have < file.size_bytes:
                    idle = 0 if have > before else idle + 1
                    self._wait(file, have, idle, problem)
            return digest.hexdigest()

    def _wait(self, file: RepoFile, have: int, idle: int, problem: str) -> None:
        self._check_stop()
        if idle >= _MAX_IDLE_ATTEMPTS:
            raise HubUnreachableError(
                f"{file.path} ends at byte {have} of {file.size_bytes} after {idle} attempts: {problem}"
            )
        self._meter.note(f"{file.path}: {problem}; continuing at byte {have}", file)
        if idle:
            self._sleep(min(_BACKOFF_S * 2 ** (idle - 1), _MAX_BACKOFF_S))

    def _digest_of(self, file: RepoFile, have: int) -> _Hash:
        """The checksum of the beginning that is there."""
        digest = _new_digest(file)
        with open(self._cache.part(file), "rb") as beginning:
            while have > 0 and (block := beginning.read(min(_BLOCK_BYTES, have))):
                self._check_stop()
                digest.update(block)
                have -= len(block)
        return digest

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    @contextmanager
    def _locked(self, file: RepoFile) -> Iterator[None]:
        from filelock import FileLock

        path = self._cache.lock(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=_LOCK_MODE)
        has_told = False
        while not lock.is_locked:
            self._check_stop()
            try:
                lock.acquire(timeout=_LOCK_POLL_S)
            except TimeoutError:
                if not has_told:
                    self._meter.note(f"{file.path}: another process downloads it, waiting", file)
                    has_told = True
        try:
            yield
        finally:
            lock.release()


def _new_digest(file: RepoFile) -> _Hash:
    """SHA-256 of a large file, git's SHA-1 of a small one."""
    if file.is_large:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
