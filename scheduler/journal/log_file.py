"""The decision log as a file: every call of the `Scheduler` and every decision; `replay.py` repeats them.

    for run in read_runs(path):                  # one run per start of a scheduler, oldest first
        print(run.header.capacity, run.header.scheduler_config().schedule_policy)
        for record in run.records:               # in the order of the calls; can be read once
            match record:
                case Input(): ...                # a message, before the scheduler took it
                case Arrived(): ...              # it queued a request; a refused request has no such record
                case PassRecord(): ...           # a pass, as in `Scheduler.decisions`
                case Settled(): ...              # the result of a step; aborts and deadlines
                case Handover(): ...             # with --disaggregation-mode: the KV of a prompt
                case Planning() | Idle(): ...    # calls without a decision of their own; only replay needs them
        print(run.damage)                        # "" if all of it could be read

`run.decisions` yields only `DecisionRecord`s: the same records as the live `Scheduler.decisions`.

    file:    run, run, ...            run:    MAGIC (8 bytes), version (u32), record, record, ...
    record:  length (u32), CRC-32 (u32), msgpack; the first of a run is its `Header`. Little-endian.

The file is only appended to, one run after the other. If a crash cuts the last record of a run, only that record is
lost: the next run begins with `MAGIC` again, and the reader searches for it. New fields go at the end of a record, with
a default; any other change needs a new version. `log_writer.py` writes the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from ...runtime.config.engine_config import CacheConfig, SchedulerConfig
from ...runtime.errors import ConfigError
from ...runtime.feasibility import Capacity
from ...runtime.installation import __version__
from ...runtime.messages import SchedulerInput
from ..records.decision_log import DecisionRecord

logger = logging.getLogger(__name__)

MAGIC: Final = b"\x89EDL\r\n\x1a\n"
"""Begins each run. As a record's length it would exceed `MAX_RECORD_BYTES`, so it cannot be mistaken for a record."""
VERSION: Final = 3
"""Version 2 had a message for each kind of call, with an id of its own, instead of `Call`."""
RUN_HEAD: Final = struct.Struct("<8sI")
RECORD_HEAD: Final = struct.Struct("<II")
MAX_RECORD_BYTES: Final = 64 << 20
_SCAN_BYTES: Final = 1 << 20
_RECORDS_PER_REPORT: Final = 256
_RENAMED: Final = {"decode_burst_ms": "multi_step_ms"}
"""Settings that older logs have under another name."""


_Config = TypeVar("_Config", SchedulerConfig, CacheConfig)


class LogFileError(ConfigError):
    """A file that is not a decision log, or that this engine cannot read."""


class Header(msgspec.Struct, tag="header", array_like=True):
    """The configuration and capacity of a scheduler at its start.

    Attributes:
        engine_version: of the engine that wrote the run.
        wall_s: seconds since 1970 at the start.
        now_s: the monotonic clock at the same moment; all other times of the run are of that clock.
        scheduler, cache: the resolved groups of the configuration, by field.
        capacity: the runner's capacity.
        eos_token_ids: tokens that end an output.
        model, device: for display only.
    """

    engine_version: str
    wall_s: float
    now_s: float
    scheduler: dict[str, Any]
    cache: dict[str, Any]
    capacity: Capacity
    eos_token_ids: list[int]
    model: str = ""
    device: str = ""

    def scheduler_config(self, **changes: object) -> SchedulerConfig:
        """The configuration of the run, with changes. Settings newer than the run have their defaults.

        Raises:
            LogFileError: the run has settings that this engine does not know, or values of another type.
            ConfigError: incompatible values.
        """
        return self._config(self.scheduler | changes, SchedulerConfig)

    def cache_config(self, **changes: object) -> CacheConfig:
        """The same for the KV memory group."""
        return self._config(self.cache | changes, CacheConfig)

    def _config(self, settings: dict[str, Any], group: type[_Config]) -> _Config:
        settings = {_RENAMED.get(name, name): value for name, value in settings.items()}
        unknown = sorted(set(settings) - {field.name for field in dataclasses.fields(group)})
        if unknown:
            raise LogFileError(
                f"the run was recorded by engine {self.engine_version} with the setting {unknown[0]}, which this one "
                f"({__version__}) does not have; read it with that version"
            )
        try:
            return msgspec.convert(settings, group)
        except msgspec.ValidationError as error:
            raise LogFileError(
                f"the settings of the run, recorded by engine {self.engine_version}, are not those of this one "
                f"({__version__}): {error}"
            ) from None

    def problem(self) -> str:
        """Reason why the capacity is invalid; "" if it is valid."""
        for name in ("max_model_len", "num_pages", "page_size", "max_running_requests", "vocab_size"):
            value = getattr(self.capacity, name)
            if value < 1:
                return f"its {name} is {value}"
        return ""


class Input(msgspec.Struct, tag="input", array_like=True):
    """`Scheduler.handle(message, now_s)` was called."""

    now_s: float
    message: SchedulerInput


class Planning(msgspec.Struct, tag="planning", array_like=True):
    """`Scheduler.next_batch(now_s)` was called; its decisions follow as records.

    Of consecutive calls without a decision, while the scheduler has no request, only the last one is written.
    """

    now_s: float


class Idle(msgspec.Struct, tag="idle", array_like=True):
    """`Scheduler.on_idle()` was called."""

    now_s: float


LogRecord = Header | Input | DecisionRecord | Planning | Idle
_decoder: Final[msgspec.msgpack.Decoder[LogRecord]] = msgspec.msgpack.Decoder(LogRecord)
_OLD_CALLS: Final = ("FlushCache", "PinPrefix", "LoadAdapter", "UnloadAdapter")


class LoggedRun:
    """The records of one scheduler, from its start to its end; read once, in order, with bounded memory.

    Attributes:
        header: the scheduler's configuration.
        damage: the part of the run that could not be read, and why; "" if none is known so far.
        on_read: called now and then with the number of bytes of the file that were read; may be set.
    """

    def __init__(self, file: BinaryIO, path: Path, header: Header) -> None:
        self.header = header
        self.damage = ""
        self.on_read: Callable[[int], None] | None = None
        self._file = file
        self._path = path
        self._records = self._read()

    @property
    def records(self) -> Iterator[LogRecord]:
        """The unread records of the run, without the header."""
        return self._records

    @property
    def decisions(self) -> Iterator[DecisionRecord]:
        """The same without the calls: the records of `Scheduler.decisions`."""
        return (
            record for record in self._records if not isinstance(record, Header | Input | Planning | Idle)
        )

    def _read(self) -> Iterator[LogRecord]:
        for number in itertools.count():
            start = self._file.tell()
            if self.on_read is not None and number % _RECORDS_PER_REPORT == 0:
                self.on_read(start)
            try:
                record = _read_record(self._file)
            except _Damage as damage:
                self.damage = f"{self._path}: {damage} at byte {start:,}; the rest of the run is lost"
                _find_magic(self._file, start + 1)
                return
            if record is None:
                return
            yield record


def read_runs(path: str | Path, lost: Callable[[str], None] | None = None) -> Iterator[LoggedRun]:
    """The runs of a decision log; see the module. Unread records of a run are skipped when the next run is requested.

    The file may grow during the iteration: the last run is read to its current end, and runs that begin later are not
    included.

    Args:
        path: the file.
        lost: called with one sentence for each run that cannot be read at all; None logs a warning.

    Raises:
        LogFileError: no such file, not a decision log, or a version that this engine does not know.
    """
    path = Path(path).expanduser()
    try:
        with _open(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise LogFileError(f"{path} is not a decision log; --decision-log FILE makes one")
            file.seek(0)
            # Read once: a writer may append while the runs are read.
            end = os.fstat(file.fileno()).st_size
            found = False
            while (start := file.tell()) < end:
                try:
                    header = _read_header(file, path)
                except _Damage as damage:
                    (lost or logger.warning)(f"{path}: a run is lost: {damage} at byte {start:,}")
                    _find_magic(file, start + 1)
                    continue
                found = True
                run = LoggedRun(file, path, header)
                yield run
                for _record in run.records:
                    pass
            if not found:
                raise LogFileError(f"{path} has no run that can be read")
    except OSError as error:
        raise LogFileError(f"{path} cannot be read: {error.strerror}") from None


def choose_runs(
    path: str | Path, chosen: int | None, lost: Callable[[str], None] | None = None
) -> Iterator[tuple[int, LoggedRun, bool]]:
    """The runs of a decision log, each with its number, from 1, and whether it is chosen.

    Args:
        chosen: the value of `--run`; None: all are chosen.
        lost: as in `read_runs`.

    Raises:
        LogFileError: as `read_runs`.
        ConfigError: there is no such run.
    """
    if chosen is not None and chosen < 1:
        raise ConfigError(f"--run is {chosen}, but runs are counted from 1")
    number = 0
    for number, run in enumerate(read_runs(path, lost), 1):
        yield number, run, chosen in (None, number)
    if chosen is not None and chosen > number:
        raise ConfigError(f"--run is {chosen}, but {path} has {number} (the last is --run {number})")


def log_bytes(path: str | Path) -> int:
    """Bytes of a decision log; 0 if it cannot be read, which `read_runs` says."""
    try:
        return Path(path).expanduser().stat().st_size
    except OSError:
        return 0


def _open(path: Path) -> BinaryIO:
    """Open a regular file and refuse anything else; `O_NONBLOCK` avoids waiting on a pipe without a writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise LogFileError(f"{path} is {what}; name the file of a decision log")
    return os.fdopen(fd, "rb")


class _Damage(Exception):
    """Bytes that are not a record."""


def _read_header(file: BinaryIO, path: Path) -> Header:
    head = file.read(RUN_HEAD.size)
    if len(head) < RUN_HEAD.size:
        raise _Damage("the file ends inside a run's first bytes")
    magic, version = RUN_HEAD.unpack(head)
    if magic != MAGIC:
        raise _Damage("no run begins here")
    if version > VERSION:
        raise LogFileError(
            f"{path} is a decision log of version {version}, this engine ({__version__}) reads up to {VERSION}; "
            "use the engine that wrote it, or a newer one"
        )
    header = _read_record(file)
    if not isinstance(header, Header):
        raise _Damage("a run without a header")
    if problem := header.problem():
        raise _Damage(f"the header is invalid, {problem},")
    return header


def _read_record(file: BinaryIO) -> LogRecord | None:
    """The next record; None, with nothing consumed, at the end of the run.

    Raises:
        _Damage: the bytes are not a record.
    """
    head = file.read(RECORD_HEAD.size)
    if not head or head == MAGIC:
        file.seek(-len(head), os.SEEK_CUR)
        return None
    if len(head) < RECORD_HEAD.size:
        raise _Damage("the file ends inside a record")
    length, checksum = RECORD_HEAD.unpack(head)
    if length > MAX_RECORD_BYTES:
        raise _Damage("damaged")
    payload = file.read(length)
    if len(payload) < length:
        raise _Damage("the file ends inside a record")
    if zlib.crc32(payload) != checksum:
        raise _Damage("damaged")
    try:
        return _decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: deeply nested lists
        raise _Damage(f"a record that this engine ({__version__}) does not understand ({error})") from None


def _decode(payload: bytes) -> LogRecord:
    """The record in these bytes, also a call that was written by version 2: `[tag, id, field, ...]`.

    Raises:
        MsgspecError, RecursionError: they are no record.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError:
        match msgspec.msgpack.decode(payload):
            case ["input", now_s, [str(tag), int(call_id), *fields]] if tag in _OLD_CALLS:
                return msgspec.convert(["input", now_s, ["Call", call_id, [tag, *fields]]], Input)
        raise


def _find_magic(file: BinaryIO, start: int) -> None:
    """Seek to the first run that begins at or after `start`, or to the end."""
    file.seek(start)
    kept = b""
    while chunk := file.read(_SCAN_BYTES):
        window = kept + chunk
        found = window.find(MAGIC)
        if found >= 0:
            file.seek(found - len(window), os.SEEK_CUR)
            return
        kept = window[-len(MAGIC) + 1 :]
