"""Segment files: records of a header, a payload, and zeros up to a multiple of 4 KiB; a sealed one ends with an index.

Nothing is flushed to the disk: the checksums of a record are tested when it is read, and one that is damaged, or was
lost with the machine's power, is a miss. A segment without an index is searched for headers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..prefix_cache.tier_pages import DIGEST_BYTES

Write = Callable[[int, memoryview, int], int]
"""`os.pwrite`."""

_ALIGNMENT: Final = 4096

_HEADER: Final = struct.Struct(f"<8s{DIGEST_BYTES}sIII")
"""Magic, key, bytes of the payload, CRC-32 of the payload, CRC-32 of the header up to here."""
_PAYLOAD: Final = 64
"""Offset of the payload."""
_RECORD: Final = b"KVPAGE1\n"

_ENTRY: Final = struct.Struct(f"<{DIGEST_BYTES}sQ")
"""Entry of an index: key, offset."""
_FOOTER: Final = struct.Struct("<8sIIQ")
"""Magic, entries, CRC-32 of the entries, their offset."""
_SEALED: Final = b"KVSEAL1\n"


def record_bytes(payload_bytes: int) -> int:
    """Size of a record."""
    return -(-(_PAYLOAD + payload_bytes) // _ALIGNMENT) * _ALIGNMENT


class RecordBuffer:
    """Memory of n records with payloads of one size, as they are in a file.

    Attributes:
        rows: [n, record bytes] uint8.
        records: [n, 64 + payload bytes] uint8, the rows without the zeros at their ends.
        payloads: [n, payload bytes] uint8, a part of `rows`.
    """

    def __init__(self, num_records: int, payload_bytes: int) -> None:
        self.rows: npt.NDArray[np.uint8] = np.zeros((num_records, record_bytes(payload_bytes)), np.uint8)
        self.records = self.rows[:, : _PAYLOAD + payload_bytes]
        self.payloads = self.rows[:, _PAYLOAD : _PAYLOAD + payload_bytes]

    def seal(self, row: int, key: bytes) -> None:
        """Write the header of a row."""
        payload = self.payloads[row]
        head = _HEADER.pack(_RECORD, key, payload.size, zlib.crc32(payload), 0)[:-4]
        self.rows[row, : _HEADER.size] = np.frombuffer(
            head + zlib.crc32(head).to_bytes(4, "little"), np.uint8
        )

    def holds(self, row: int, key: bytes) -> bool:
        """Whether a row is the undamaged record of a key."""
        payload = self.payloads[row]
        return _parsed(self.rows[row, : _HEADER.size].tobytes()) == (key, payload.size, zlib.crc32(payload))


def _parsed(head: bytes) -> tuple[bytes, int, int] | None:
    """Key, payload bytes and payload CRC; None: this is no header."""
    if len(head) < _HEADER.size:
        return None
    magic, key, payload_bytes, payload_crc, crc = _HEADER.unpack(head)
    if magic != _RECORD or crc != zlib.crc32(head[:-4]):
        return None
    return key, payload_bytes, payload_crc


def read_record(fd: int, offset: int) -> bytes:
    """The bytes of a record, not checked; b"" if there is none."""
    head = _parsed(os.pread(fd, _HEADER.size, offset))
    return b"" if head is None else os.pread(fd, record_bytes(head[1]), offset)


def write_all(write: Write, fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, or cut the file off where it would begin.

    Raises:
        OSError: it cannot be written.
    """
    done = 0
    try:
        while done < len(data):
            done += write(fd, data[done:], offset + done)
    except OSError:
        os.ftruncate(fd, offset)
        raise


def write_index(write: Write, fd: int, offsets: Mapping[bytes, int], size: int) -> None:
    """Seal a segment whose records end at `size`; raises as `write_all`."""
    entries = b"".join(_ENTRY.pack(key, offset) for key, offset in offsets.items())
    footer = _FOOTER.pack(_SEALED, len(offsets), zlib.crc32(entries), size)
    write_all(write, fd, memoryview(entries + footer), size)


def read_index(fd: int) -> dict[bytes, int] | None:
    """Offset of each record of a sealed segment by key; None: the index is damaged."""
    size = os.fstat(fd).st_size
    footer = os.pread(fd, _FOOTER.size, max(0, size - _FOOTER.size))
    if len(footer) < _FOOTER.size:
        return None
    magic, count, crc, offset = _FOOTER.unpack(footer)
    if magic != _SEALED or offset + count * _ENTRY.size + _FOOTER.size != size:
        return None
    entries = os.pread(fd, count * _ENTRY.size, offset)
    return dict(_ENTRY.iter_unpack(entries)) if zlib.crc32(entries) == crc else None


def find_records(fd: int, begin: int = 0) -> tuple[dict[bytes, int], int]:
    """Offset of each whole record from `begin` on by key, and the end of the last one; reads the headers only."""
    offsets: dict[bytes, int] = {}
    size = os.fstat(fd).st_size
    offset = end = begin
    while offset < size:
        head = _parsed(os.pread(fd, _HEADER.size, offset))
        if head is None:
            offset += _ALIGNMENT
        elif offset + record_bytes(head[1]) > size:
            break  # it is being written, or its engine has ended
        else:
            offsets[head[0]] = offset
            offset = end = offset + record_bytes(head[1])
    return offsets, end


def sync_folder(folder: Path) -> None:
    """Have the names in a folder, and their absence, survive a loss of power; raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock(fd: int, path: Path) -> bool:
    """Lock an open segment until it is closed; False: another engine has it, or has sealed it meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_ino == path.stat().st_ino
    except OSError:
        return False


def is_abandoned(path: Path) -> bool:
    """Whether the engine that wrote an open segment has ended."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return lock(file.fileno(), path)
    return False
