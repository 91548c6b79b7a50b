"""`LogWriter`: appends a run to a decision log; see `log_file.py` for the format."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import stat
import zlib
from pathlib import Path
from typing import Final

import msgspec

from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.feasibility import Capacity
from ...runtime.installation import __version__
from .log_file import MAGIC, MAX_RECORD_BYTES, RECORD_HEAD, RUN_HEAD, VERSION, Header, LogRecord

logger = logging.getLogger(__name__)

_MODE: Final = 0o600
"""Only the owner may read the file: it contains the token ids of every prompt."""
_FOR_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def header_of(
    config: EngineConfig, capacity: Capacity, eos_token_ids: frozenset[int], *, wall_s: float, now_s: float
) -> Header:
    """The header of a run that begins now, with a resolved configuration; without the password of a store."""
    cache = config.cache
    if cache.kv_store is not None:
        cache = dataclasses.replace(cache, kv_store=cache.kv_tier_place)
    return Header(
        __version__,
        wall_s,
        now_s,
        dataclasses.asdict(config.scheduler),
        dataclasses.asdict(cache),
        capacity,
        sorted(eos_token_ids),
        config.model.name_in_api(config.model.model),
        str(config.model.device),
    )


def check_log_file(path: str | Path) -> None:
    """Check that a run can be written to a file, before there is one; a file that was not there is not left.

    Raises:
        ConfigError: as `LogWriter`.
    """
    was_there = Path(path).expanduser().exists()
    writer = LogWriter(path)
    writer.discard()
    if not was_there:
        Path(path).expanduser().unlink(missing_ok=True)


class LogWriter:
    """One run in a file. Records are buffered; `flush` writes them with one system call.

    Flushed records survive any end of the process. A full disk, or another failure to write, ends the log and not the
    service: one warning is logged, and nothing is recorded from then on.
    """

    def __init__(self, path: str | Path, header: Header | None = None) -> None:
        """Open or create the file, and begin a run after the existing ones.

        Args:
            header: None if it is not yet known: then `begin` must be called before any other method.

        Raises:
            ConfigError: the file is not a decision log, another process writes it, or it cannot be written.
        """
        self._path = Path(path).expanduser()
        self._encoder = msgspec.msgpack.Encoder()
        self._pending = bytearray(RUN_HEAD.pack(MAGIC, VERSION))
        self._fd: int | None = self._open()
        if header is not None:
            self.begin(header)

    def begin(self, header: Header) -> None:
        """Write the head of the run."""
        self.add(header)
        self.flush()

    def add(self, record: LogRecord) -> None:
        """Buffer a record for the next `flush`."""
        if self._fd is None:
            return
        payload = self._encoder.encode(record)
        if len(payload) > MAX_RECORD_BYTES:
            self._give_up(f"a record has {len(payload):,} bytes, the limit is {MAX_RECORD_BYTES:,}")
            return
        self._pending += RECORD_HEAD.pack(len(payload), zlib.crc32(payload))
        self._pending += payload

    def flush(self) -> None:
        """Write the buffered records."""
        if self._fd is None or not self._pending:
            return
        try:
            written = os.write(self._fd, self._pending)
        except OSError as error:
            self._give_up(str(error.strerror))
            return
        if written < len(self._pending):
            self._give_up("the disk is full")
            return
        self._pending.clear()

    def close(self) -> None:
        """Write the buffered records and close the file; may be called more than once."""
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def discard(self) -> None:
        """Close the file without writing the buffered records."""
        self._pending.clear()
        self.close()

    def _give_up(self, reason: str) -> None:
        logger.warning(
            "decision log stops here path=%s: %s; requests are served as before", self._path, reason
        )
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None
        self._pending.clear()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, _MODE)
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from None
        try:
            self._check(fd)
        except ConfigError:
            os.close(fd)
            raise
        return fd

    def _check(self, fd: int) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._error("is not a regular file; name another")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._error("another process is writing; name another file") from None
        except OSError as error:
            raise self._error(f"cannot be locked ({error.strerror}); name one on a local disk") from None
        begin = os.pread(fd, len(MAGIC), 0)
        if begin and begin != MAGIC:
            raise self._error("exists and is no decision log; name another file")
        if status.st_mode & _FOR_OTHERS:
            try:
                os.fchmod(fd, _MODE)
            except OSError:
                raise self._error(
                    "others than its owner can read, and it has every prompt; name another file"
                ) from None

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"decision_log is {str(self._path)!r}, which {problem}")
