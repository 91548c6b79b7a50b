"""`SegmentStore`: records by key in segments of a folder that several engines may use, each of which may die.

    DIR/                  the folder of `--kv-disk`; its limit holds for all that is in it
      IDENTITY/           mode 0700: the records of one identity
        identity.json     its facts, for people
        NAME.open         a segment that an engine appends to, and holds a lock on
        NAME.kv           a sealed segment

All engines read all segments, those of others as far as they are written: whole records by their headers. The replicas
of a server find each other's prompts, whichever of them goes on with which segment after a restart.
An engine goes on with the open segment of one that has ended, after its last whole record. Whole segments are evicted,
the least recently found one first, whatever its identity; the modification time of a file is the time of its last hit.
To forget is to delete files, also that to which another engine appends: it begins a new one, and never seals the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ...runtime.errors import ConfigError
from .page_store import StoreError
from .segment_file import (
    RecordBuffer,
    Write,
    find_records,
    is_abandoned,
    lock,
    read_index,
    read_record,
    sync_folder,
    write_all,
    write_index,
)

logger = logging.getLogger(__name__)

_SEGMENT_BYTES: Final = 64 << 20
_LEAST_SEGMENTS: Final = 8
"""A folder with a small limit has so many segments, smaller ones."""
_COPIED_SHARE: Final = 4
"""Of dying segments at most 1/4 of a segment is copied, so that evicting one always gains room."""


class _File(NamedTuple):
    """A segment of any identity; the least recently found one is the smallest."""

    hit_ns: int
    path: Path
    size: int


class _Segment:
    """A segment with records that can be read.

    Attributes:
        path: of the file.
        offsets: of its records by key; `SegmentStore` may use those of another segment, or none.
        reads: number of reads of each key by this process.
        end: up to where an open segment of another engine was read.
    """

    def __init__(self, path: Path, offsets: dict[bytes, int]) -> None:
        self.path = path
        self.offsets = offsets
        self.reads: Counter[bytes] = Counter()
        self.end = 0


class SegmentStore:
    """See the module. One thread uses it. It never fails once it is open: a read is a miss, writing ends.

    Attributes:
        writes: False: the disk was full, or failed.
        used_bytes: of all identities; what other engines write is counted when this one begins a segment.
    """

    def __init__(
        self,
        root: Path,
        identity: bytes,
        facts: Mapping[str, Any],
        limit_bytes: int,
        *,
        write: Write = os.pwrite,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the records of an identity.

        Args:
            root: see `check_folder`.
            facts: of the identity, for people.
            limit_bytes: of all identities in `root`.

        Raises:
            OSError: the folder cannot be read or written.
        """
        self._root = root
        self._folder = root / identity.hex()
        self._limit_bytes = limit_bytes
        self._segment_bytes = _segment_bytes(limit_bytes)
        self._write = write
        self._wall_ns = wall_ns
        self._index: dict[bytes, _Segment] = {}
        self._segments: dict[Path, _Segment] = {}
        self._active: _Segment | None = None
        self._fd = -1  # of the active segment
        self._size = 0  # the same
        self._last_stamp = max((file.hit_ns for file in _all_segments(root)), default=0)
        self._seen_ns = -1
        self._has_warned = False
        self.writes = True
        self.used_bytes = 0
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / "identity.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
        for path in self._folder.glob("*.open"):
            with contextlib.suppress(FileNotFoundError):  # sealed, or forgotten, meanwhile
                self._adopt(path)
        self._refresh()
        with contextlib.suppress(OSError):
            self._make_room(0)  # the limit may be smaller than that of an earlier process
        logger.info("kv_disk=%s pages=%d identity=%s", root, len(self), identity.hex()[:16])

    def __len__(self) -> int:
        return len(self._index)

    def forget(self) -> None:
        """Delete all records of the identity, whichever engine wrote or writes them.

        Raises:
            StoreError: a file may be there after a crash.
        """
        self._leave_active()
        why = ""
        for path in (*self._folder.glob("*.open"), *self._folder.glob("*.kv")):
            for suffix in (".open", ".kv"):  # in this order: its engine may seal it at this moment
                try:
                    path.with_suffix(suffix).unlink(missing_ok=True)
                except OSError as error:
                    why = f"{path} cannot be deleted: {error.strerror}"
                    logger.warning("%s", why)
        for segment in list(self._segments.values()):
            self._drop(segment)
        self.used_bytes = sum(file.size for file in _all_segments(self._root))
        try:
            sync_folder(self._folder)
        except OSError as error:
            why = why or f"{self._folder} cannot be synced: {error.strerror}"
        if why:
            raise StoreError(why)

    def close(self) -> None:
        """Leave the active segment to the next process."""
        self._leave_active()

    # ------------------------------------------------------------ reading

    def find(self, keys: Iterable[bytes]) -> int:
        """Number of first keys that have records, whose segments are now the most recently found ones."""
        self._refresh()
        found: list[_Segment] = []
        for key in keys:
            segment = self._index.get(key)
            if segment is None:
                break
            found.append(segment)
        for segment in dict.fromkeys(found):
            self._stamp(segment.path)
        return len(found)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self._refresh()
        return [key in self._index for key in keys]

    def read(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        """Read the records of keys into the rows of a buffer; returns how many, up to the first that is a miss."""
        done = 0
        while done < len(keys) and (segment := self._index.get(keys[done])) is not None:
            end = self._read_run(segment, keys, done, buffer)
            for row, key in enumerate(keys[done:end], done):
                if not buffer.holds(row, key):
                    self._lose(segment, key)
                    return row
                segment.reads[key] += 1
            done = end
        return done

    def _read_run(self, segment: _Segment, keys: Sequence[bytes], begin: int, buffer: RecordBuffer) -> int:
        """Read records from `begin` on that follow one another in a segment; returns the end of their rows.

        Rows that cannot be read hold no record.
        """
        first, size = segment.offsets[keys[begin]], buffer.rows.shape[1]
        end = begin + 1
        while end < len(keys) and segment.offsets.get(keys[end]) == first + (end - begin) * size:
            end += 1
        rows = buffer.rows[begin:end]
        rows[:, 0] = 0
        with contextlib.suppress(OSError), segment.path.open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [rows.data.cast("B")], first)
        return end

    def _lose(self, segment: _Segment, key: bytes) -> None:
        """A record is damaged, or its segment was evicted by another engine."""
        if not segment.path.exists():
            self._drop(segment)
            return
        del segment.offsets[key]
        if self._index.get(key) is segment:
            del self._index[key]
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: a record is damaged; its tokens are computed again", segment.path)

    # ------------------------------------------------------------ writing

    def write(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        """Store the first payloads of a buffer under keys without a record; returns how many are stored."""
        for row, key in enumerate(keys):
            buffer.seal(row, key)
        size = buffer.rows.shape[1]
        done = 0
        while done < len(keys) and self.writes:
            try:
                self._have_active(size)
                end = min(len(keys), done + max(1, (self._segment_bytes - self._size) // size))
                self._append(keys[done:end], buffer.rows[done:end].data.cast("B"))
                done = end
            except OSError as error:
                self.writes = False
                logger.warning(
                    "%s: nothing more is stored there until a restart: %s; make room, or set a smaller "
                    "--kv-disk-size",
                    self._root,
                    error.strerror,
                )
        return done

    def _append(self, keys: Sequence[bytes], data: memoryview) -> None:
        """Append records of one size to the active segment."""
        assert self._active is not None
        write_all(self._write, self._fd, data, self._size)
        step = len(data) // len(keys)
        for key in keys:
            self._active.offsets[key] = self._size
            self._index[key] = self._active
            self._size += step
        self.used_bytes += len(data)

    def _have_active(self, size: int) -> None:
        """Have an active segment with room for a record of this size, or an empty one."""
        self._leave_if_gone()
        if self._active is not None and self._size and self._size + size > self._segment_bytes:
            self._seal()
        if self._active is None:
            saved = self._make_room(max(size, self._segment_bytes))
            path = self._folder / f"{secrets.token_hex(8)}.open"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._activate(path, fd, {}, 0)
            for key, record in saved.items():
                self._append([key], memoryview(record))

    def _activate(self, path: Path, fd: int, offsets: dict[bytes, int], size: int) -> None:
        self._active = self._add(path, offsets)
        self._fd, self._size = fd, size

    def _adopt(self, path: Path) -> None:
        """Go on with a segment of an engine that has ended, without its torn end; an earlier one is sealed."""
        fd = os.open(path, os.O_RDWR)
        if not lock(fd, path):
            os.close(fd)
            return
        offsets, size = find_records(fd)
        os.ftruncate(fd, size)
        if self._active is not None:
            self._seal()
        self._activate(path, fd, offsets, size)

    def _seal(self) -> None:
        """Write the index of the active segment; from now on all engines read it."""
        segment = self._active
        assert segment is not None
        write_index(self._write, self._fd, segment.offsets, self._size)
        sealed = segment.path.with_suffix(".kv")
        try:
            segment.path.rename(sealed)
        except FileNotFoundError:
            self._leave_if_gone()
            return
        self._segments[sealed] = self._segments.pop(segment.path)
        segment.path = sealed
        self._stamp(sealed)
        self._leave_active()

    def _leave_active(self) -> None:
        """Close the active segment, which ends its lock."""
        if self._active is not None:
            self._active = None
            with contextlib.suppress(OSError):  # of earlier writes, on a network's disk
                os.close(self._fd)

    def _leave_if_gone(self) -> None:
        """Forget the active segment if another engine has deleted it."""
        if self._active is not None and not os.fstat(self._fd).st_nlink:
            self._drop(self._active)
            self._leave_active()

    # ------------------------------------------------------------ segments

    def _refresh(self) -> None:
        """See what other engines have appended, sealed, evicted and forgotten."""
        self._leave_if_gone()
        with contextlib.suppress(OSError):
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns != self._seen_ns:
                self._seen_ns = changed_ns
                self._refresh_segments()
        for segment in self._segments.values():
            if segment is not self._active and segment.path.suffix == ".open":
                with contextlib.suppress(OSError):
                    self._read_appended(segment)

    def _refresh_segments(self) -> None:
        sealed = set(self._folder.glob("*.kv"))
        present = sealed | set(self._folder.glob("*.open"))
        for path, segment in list(self._segments.items()):
            if segment is not self._active and path not in present:
                self._drop(segment)
        for path in present - self._segments.keys():
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                offsets = read_index(file.fileno()) if path in sealed else {}
                if offsets is None:
                    offsets, _ = find_records(file.fileno())
                self._add(path, offsets)

    def _read_appended(self, segment: _Segment) -> None:
        if segment.path.stat().st_size <= segment.end:
            return
        with segment.path.open("rb", buffering=0) as file:
            offsets, segment.end = find_records(file.fileno(), segment.end)
        segment.offsets |= offsets
        for key in offsets:
            self._index.setdefault(key, segment)

    def _add(self, path: Path, offsets: dict[bytes, int]) -> _Segment:
        segment = self._segments[path] = _Segment(path, offsets)
        for key in offsets:
            self._index.setdefault(key, segment)
        return segment

    def _drop(self, segment: _Segment) -> None:
        """Forget a segment that is gone."""
        self._segments.pop(segment.path, None)
        for key in segment.offsets:
            if self._index.get(key) is segment:
                del self._index[key]

    def _stamp(self, path: Path) -> None:
        """Note a hit. Stamps only grow, also when the clock is set back."""
        self._last_stamp = max(self._wall_ns(), self._last_stamp + 1)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(self._last_stamp, self._last_stamp))

    def _make_room(self, needed: int) -> dict[bytes, bytes]:
        """Evict segments until there is room for a new one; returns records of them that are read often.

        Raises:
            OSError: segments that are being written take all of the room.
        """
        files = sorted(_all_segments(self._root))
        self._last_stamp = max(self._last_stamp, files[-1].hit_ns if files else 0)
        used = sum(file.size for file in files)
        allowed = _allowed_bytes(self._root, self._limit_bytes, used)
        saved: dict[bytes, bytes] = {}
        for file in files:
            if used + needed <= allowed:
                break
            if file.path.suffix == ".open" and not is_abandoned(file.path):
                continue
            segment = self._segments.get(file.path)
            if segment is not None:
                saved |= self._hot_records(
                    segment, self._segment_bytes // _COPIED_SHARE - sum(map(len, saved.values()))
                )
                self._drop(segment)
            with contextlib.suppress(FileNotFoundError):
                file.path.unlink()
            used -= file.size
        self.used_bytes = used
        if used + needed > allowed:
            raise OSError(errno.ENOSPC, f"{used >> 20} MiB are used, and {allowed >> 20} MiB may be")
        return saved

    def _hot_records(self, segment: _Segment, room: int) -> dict[bytes, bytes]:
        """Records that this process has read more than once, to be copied; after that they must be read again."""
        found: dict[bytes, bytes] = {}
        with contextlib.suppress(OSError), segment.path.open("rb", buffering=0) as file:
            for key, reads in segment.reads.most_common():
                if reads > 1 and self._index.get(key) is segment:
                    record = read_record(file.fileno(), segment.offsets[key])
                    room -= len(record)
                    if not record or room < 0:
                        break
                    found[key] = record
        return found


def check_folder(root: Path, limit_bytes: int) -> None:
    """Make the folder if there is none, and try it.

    Raises:
        ConfigError: it is no folder, cannot be written or locked, or has no room.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        used = sum(segment.size for segment in _all_segments(root))
        room = _allowed_bytes(root, limit_bytes, used)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            f"kv_disk is {root}, which is or is in a file; name a folder with --kv-disk"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"kv_disk is {root}, but files cannot be made and locked there: {error.strerror}; name another folder "
            "with --kv-disk"
        ) from None
    needed = _segment_bytes(limit_bytes)
    if room < needed:
        raise ConfigError(
            f"kv_disk is {root}, where {2 * room >> 20} MiB are free or its own; it takes half of them at most, and "
            f"a file of it has {-(-needed >> 20)} MiB; make room there, or name a folder on another disk with --kv-disk"
        )


def _segment_bytes(limit_bytes: int) -> int:
    return min(_SEGMENT_BYTES, limit_bytes // _LEAST_SEGMENTS)


def _all_segments(root: Path) -> list[_File]:
    found = []
    for path in (*root.glob("*/*.kv"), *root.glob("*/*.open")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append(_File(stat.st_mtime_ns, path, stat.st_size))
    return found


def _allowed_bytes(root: Path, limit_bytes: int, used_bytes: int) -> int:
    """Bytes for all segments: at most half of what they and the free space are together."""
    stat = os.statvfs(root)
    return min(limit_bytes, (used_bytes + stat.f_bavail * stat.f_frsize) // 2)
