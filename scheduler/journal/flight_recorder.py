"""`FlightRecorder`: the scheduler's last decisions in two small files, for the report of a crash.

It is always on. The decisions of a pass are written before the step is launched, so that they survive any end of the
process. A pass costs one encoded record and one `write`: 1.8 us of CPU, 2.7 with eight verdicts. Each request that
arrives costs the same; it is recorded before the scheduler handles it. When one file is full the other is emptied, so
between 128 and 256 KiB are kept. The files contain no token ids, neither of prompts nor of answers.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from ...launch.child.crash_report import DECISION_NAMES
from ...runtime.messages import GenerateRequest, GrammarReady, SchedulerInput
from ..batch import ScheduleBatch
from ..records.decision_log import Arrived, DecisionLog, DecisionRecord, Handover, PassRecord, Settled
from ..records.verdict import AddReqResult
from .recorder import Recorder

logger = logging.getLogger(__name__)

_HALF_BYTES: Final = 128 << 10
_HEAD: Final = struct.Struct("<II")  # length and CRC-32 of a record


class Received(msgspec.Struct, tag="received", array_like=True, gc=False):
    """A request, or its grammar, is about to be handled; if it ends the process, this is its only record."""

    now_s: float
    rid: str


_Record = DecisionRecord | Received
_decoder: Final[msgspec.msgpack.Decoder[_Record]] = msgspec.msgpack.Decoder(_Record)


class FlightRecorder(Recorder):
    """A `Recorder` that wraps another one."""

    def __init__(
        self, inner: Recorder, decisions: DecisionLog, folder: Path, half_bytes: int = _HALF_BYTES
    ) -> None:
        """Begin with empty files.

        Args:
            inner: the wrapped recorder; it gets every call.
            decisions: the scheduler's decision log.
            folder: folder of the files; if they cannot be written, nothing is recorded.
            half_bytes: size of one file.
        """
        self._inner = inner
        self._decisions = decisions
        self._encoder = msgspec.msgpack.Encoder()
        self._num_seen = decisions.num_records
        self._half_bytes = self._room = half_bytes
        self._fds: list[int] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            for name in DECISION_NAMES:
                self._fds.append(os.open(folder / name, flags, 0o600))
        except OSError as error:
            self._give_up(error)

    def received(self, message: SchedulerInput, now_s: float) -> None:
        self._inner.received(message, now_s)
        if isinstance(message, GenerateRequest | GrammarReady) and self._fds:
            self._write(self._framed(Received(now_s, message.rid)))

    def planning(self, now_s: float) -> None:
        self._inner.planning(now_s)
        self._keep()

    def planned(self, batch: ScheduleBatch | None) -> None:
        self._inner.planned(batch)
        self._keep()

    def settled(self) -> None:
        self._inner.settled()
        self._keep()

    def idle(self, now_s: float) -> None:
        self._inner.idle(now_s)

    def close(self) -> None:
        self._inner.close()
        self._keep()

    def _keep(self) -> None:
        num_records = self._decisions.num_records
        if num_records == self._num_seen or not self._fds:
            return
        data = bytearray()
        for record in self._decisions.since(self._num_seen):
            data += self._framed(_without_tokens(record))
        self._num_seen = num_records
        self._write(data)

    def _framed(self, record: _Record) -> bytes:
        payload = self._encoder.encode(record)
        return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload

    def _write(self, data: bytes | bytearray) -> None:
        try:
            if self._room < len(data):
                self._fds.reverse()
                os.ftruncate(self._fds[0], 0)
                self._room = self._half_bytes
            self._room -= os.write(self._fds[0], data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Stop recording; a crash report without decisions is still useful."""
        logger.info("no decisions are kept for a crash report: %s", error.strerror)
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _without_tokens(record: DecisionRecord) -> DecisionRecord:
    if isinstance(record, Settled) and record.next_token_ids:
        return msgspec.structs.replace(record, next_token_ids=b"")
    return record


def read_decisions(folder: Path) -> list[_Record]:
    """The records of a `FlightRecorder`, oldest first; an incomplete record is left out."""
    halves = [list(_read_half(folder / name)) for name in DECISION_NAMES]
    halves.sort(key=lambda half: half[0].now_s if half else 0.0)
    return [record for half in halves for record in half]


def started_requests(folder: Path) -> set[str] | None:
    """Requests that the recorded passes started or continued, and requests that arrived after the last of these passes.

    No recorded pass followed the latter, so one of them may have ended the process on arrival or at its first
    admission. A request that started before the recorded passes and has no token since is missing. This is rare: a
    partial prefill is in each pass.

    Returns:
        rids; None if no pass is recorded, or the records cannot be read.
    """
    passes: list[PassRecord] = []
    came: set[str] = set()
    try:
        for record in read_decisions(folder):
            match record:
                case PassRecord():
                    passes.append(record)
                    came.clear()
                case Received():
                    came.add(record.rid)
    except Exception:  # the process may have died while it wrote the file; callers handle None
        logger.warning("the requests that the scheduler had started cannot be read", exc_info=True)
        return None
    if not passes:
        return None
    verdicts = (verdict for record in passes for verdict in (*record.verdicts, *record.continued))
    return came | {verdict.rid for verdict in verdicts if verdict.result is AddReqResult.CONTINUE}


def decision_lines(folder: Path, max_lines: int = 400) -> list[str]:
    """The records as text: seconds relative to the last record, then the decision."""
    records = read_decisions(folder)
    lines = [
        f"{record.now_s - records[-1].now_s:+9.3f} s  {line}" for record in records for line in _lines(record)
    ]
    return lines[-max_lines:]


def _lines(record: _Record) -> Iterator[str]:
    match record:
        case Received():
            yield f"received rid={record.rid}"
        case Arrived():
            yield (
                f"arrived rid={record.rid} prompt_len={record.prompt_len} max_new_tokens={record.max_new_tokens} "
                f"priority={record.priority}"
            )
        case Handover():
            yield f"handover rid={record.rid} {record.event}: {record.detail}"
        case PassRecord():
            yield from record.lines()
        case Settled():
            yield f"settled step={record.step_id} forward_ms={record.forward_s * 1e3:.1f}"
            for row, error in record.errors.items():
                yield f"settled step={record.step_id} row={row} error={error}"
            if record.out_of_memory:
                yield f"settled step={record.step_id} out_of_memory={record.out_of_memory}"
            for left in record.left:
                yield f"left rid={left.rid} {left.kind} output_len={left.output_len} {left.message}".rstrip()


def _read_half(path: Path) -> Iterator[_Record]:
    try:
        data = path.read_bytes()
    except OSError:
        return
    start = 0
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        payload = data[start : start + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        start += length
        try:
            yield _decoder.decode(payload)
        except msgspec.MsgspecError:
            return
