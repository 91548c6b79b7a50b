"""Records on the disk: what is found after an engine has died at any place, and how the room is shared."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from engine.runtime.errors import ConfigError
from engine.scheduler.kv_stores import segment_store
from engine.scheduler.kv_stores.segment_file import RecordBuffer, record_bytes
from engine.scheduler.kv_stores.segment_store import SegmentStore, check_folder

IDENTITY = b"\1" * 32
PAYLOAD = 5000
RECORD = record_bytes(PAYLOAD)
SEGMENT = 1 << 20
LIMIT = 8 * SEGMENT
PER_SEGMENT = SEGMENT // RECORD


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room, whatever that of the test's machine has."""
    monkeypatch.setattr(segment_store, "_allowed_bytes", lambda _root, limit_bytes, _used_bytes: limit_bytes)


def open_store(root: Path, identity: bytes = IDENTITY, limit_bytes: int = LIMIT, **more: Any) -> SegmentStore:
    return SegmentStore(root, identity, {"format": 1}, limit_bytes, **more)


def key_of(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=32).digest()


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(PAYLOAD)


def put(store: SegmentStore, numbers: Sequence[int]) -> int:
    buffer = RecordBuffer(len(numbers), PAYLOAD)
    for row, number in enumerate(numbers):
        buffer.payloads[row] = np.frombuffer(payload_of(number), np.uint8)
    return store.write([key_of(number) for number in numbers], buffer)


def got(store: SegmentStore, numbers: Sequence[int]) -> list[int]:
    """The numbers that the store reads, all of them right."""
    buffer = RecordBuffer(len(numbers), PAYLOAD)
    count = store.read([key_of(number) for number in numbers], buffer)
    assert all(buffer.payloads[row].tobytes() == payload_of(numbers[row]) for row in range(count))
    return list(numbers[:count])


def alive(store: SegmentStore, numbers: Sequence[int]) -> list[int]:
    """The same one by one, so that a miss does not hide those after it."""
    return [number for number in numbers if got(store, [number])]


def files(root: Path, suffix: str) -> list[Path]:
    return sorted(root.glob(f"*/*{suffix}"))


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[SegmentStore]]:
    opened: list[SegmentStore] = []
    yield opened
    for store in opened:
        store.close()


# ---------------------------------------------------------------- after a restart


def test_records_are_found_by_the_next_process(tmp_path):
    store = open_store(tmp_path)
    numbers = list(range(2 * PER_SEGMENT + 3))
    assert put(store, numbers[:5]) == 5 and put(store, numbers[5:]) == len(numbers) - 5
    store.close()

    store = open_store(tmp_path)

    assert len(store) == len(numbers)
    assert store.find(map(key_of, [*numbers, -1])) == len(numbers)
    assert got(store, numbers) == numbers
    assert len(files(tmp_path, ".kv")) == 2 and len(files(tmp_path, ".open")) == 1
    put(store, [1000])
    assert len(files(tmp_path, ".open")) == 1, "it goes on with the segment of the earlier process"
    store.close()


def test_a_folder_can_be_moved(tmp_path):
    store = open_store(tmp_path)
    put(store, range(PER_SEGMENT + 1))
    store.close()
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / IDENTITY.hex()).rename(moved / IDENTITY.hex())

    store = open_store(moved)

    assert got(store, range(PER_SEGMENT + 1)) == list(range(PER_SEGMENT + 1))
    store.close()


def test_others_cannot_read_it(tmp_path):
    store = open_store(tmp_path)
    put(store, range(PER_SEGMENT + 1))
    store.close()

    assert (tmp_path / IDENTITY.hex()).stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path, "")} >= {0o600}
    assert (tmp_path / IDENTITY.hex() / "identity.json").read_text().split() == ["{", '"format":', "1", "}"]


@pytest.mark.parametrize("begin", [0, RECORD - 20])
def test_killed_at_any_byte_of_a_record_the_earlier_ones_are_there(tmp_path, begin):
    """Each byte around both ends of the last record, and some between."""
    whole = tmp_path / "whole"
    whole.mkdir()
    store = open_store(whole)
    put(store, [1, 2])
    put(store, [3])
    store.close()
    (path,) = files(whole, ".open")
    for written in (*range(begin, begin + 80), *range(begin + 80, RECORD, 2039)):
        root = tmp_path / str(written)
        shutil.copytree(whole, root)
        (copy,) = files(root, ".open")
        os.truncate(copy, 2 * RECORD + written)

        store = open_store(root)

        last = [3] if written >= RECORD else []
        assert alive(store, [1, 2, 3]) == [1, 2, *last]
        put(store, [4])
        assert alive(store, [1, 2, 4]) == [1, 2, 4]
        store.close()
        shutil.rmtree(root)
    assert path.exists()


@pytest.mark.parametrize("written", [0, 1, 40, 63, 64, 4096, RECORD - 1, RECORD, RECORD + 1])
def test_killed_while_it_writes(tmp_path, written):
    def die(fd: int, data: memoryview, offset: int) -> int:
        os.pwrite(fd, data[:written], offset)
        raise Killed

    store = open_store(tmp_path)
    put(store, [1])
    store.close()
    dying = open_store(tmp_path, write=die)
    with pytest.raises(Killed):
        put(dying, [2, 3])
    dying.close()

    store = open_store(tmp_path)

    assert alive(store, [1, 2, 3]) == ([1, 2] if written >= RECORD else [1])
    put(store, [3])
    assert alive(store, [1, 3]) == [1, 3]
    store.close()


@pytest.mark.parametrize("written", [0, 1, 39, 40, 100, 500])
def test_killed_while_it_seals(tmp_path, written):
    def die(fd: int, data: memoryview, offset: int) -> int:
        if len(data) % RECORD == 0:
            return os.pwrite(fd, data, offset)
        os.pwrite(fd, data[:written], offset)
        raise Killed

    dying = open_store(tmp_path, write=die)
    with pytest.raises(Killed):
        put(dying, range(PER_SEGMENT + 1))
    dying.close()

    store = open_store(tmp_path)

    assert got(store, range(PER_SEGMENT)) == list(range(PER_SEGMENT))
    store.close()


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("sealed", [False, True])
def test_a_flipped_bit_is_a_miss_and_other_records_are_there(tmp_path, sealed, caplog):
    numbers = list(range(PER_SEGMENT + 1)) if sealed else [0, 1, 2]
    whole = tmp_path / "whole"
    whole.mkdir()
    store = open_store(whole)
    put(store, numbers)
    store.close()
    rng = random.Random(0)
    places = [
        0,
        7,
        8,
        39,
        40,
        44,
        48,
        51,
        64,
        64 + PAYLOAD - 1,
        *(rng.randrange(64, PAYLOAD) for _ in range(10)),
    ]
    for place in places:
        root = tmp_path / str(place)
        shutil.copytree(whole, root)
        (path,) = files(root, ".kv" if sealed else ".open")
        flip(path, RECORD + place)

        store = open_store(root)

        assert alive(store, numbers) == [number for number in numbers if number != 1]
        put(store, [1])
        assert alive(store, [1]) == [1], "it can be stored again"
        store.close()
        shutil.rmtree(root)
    assert "is damaged" in caplog.text or not sealed


def test_a_damaged_index_is_made_again_from_the_records(tmp_path):
    store = open_store(tmp_path)
    put(store, range(PER_SEGMENT + 1))
    store.close()
    (path,) = files(tmp_path, ".kv")
    for place in range(PER_SEGMENT * RECORD, path.stat().st_size, 101):
        flip(path, place)
        store = open_store(tmp_path)
        assert got(store, range(PER_SEGMENT)) == list(range(PER_SEGMENT))
        store.close()
        flip(path, place)


@pytest.mark.parametrize("content", [b"", b"\0" * 3 * RECORD, b"garbage" * 10_000])
@pytest.mark.parametrize("name", ["x.kv", "x.open"])
def test_a_file_without_records_harms_nothing(tmp_path, content, name):
    store = open_store(tmp_path)
    put(store, [1])
    store.close()
    (tmp_path / IDENTITY.hex() / name).write_bytes(content)

    store = open_store(tmp_path)

    assert alive(store, [1, 2]) == [1]
    assert put(store, [2]) == 1
    store.close()


def test_a_truncated_sealed_segment_has_its_first_records(tmp_path):
    store = open_store(tmp_path)
    put(store, range(PER_SEGMENT + 1))
    store.close()
    os.truncate(files(tmp_path, ".kv")[0], 5 * RECORD + 1)

    store = open_store(tmp_path)

    assert alive(store, range(PER_SEGMENT + 1)) == [0, 1, 2, 3, 4, PER_SEGMENT]
    store.close()


def test_a_folder_that_is_deleted_while_serving_is_a_miss(tmp_path, caplog):
    store = open_store(tmp_path)
    put(store, range(2 * PER_SEGMENT + 1))
    shutil.rmtree(tmp_path / IDENTITY.hex())

    assert got(store, [0]) == []
    assert put(store, range(100, 100 + 2 * PER_SEGMENT)) < 2 * PER_SEGMENT
    assert caplog.text.count("nothing more is stored") == 1
    store.close()


# ---------------------------------------------------------------- room


def test_the_least_recently_found_segment_is_evicted_first(tmp_path):
    store = open_store(tmp_path)
    for segment in range(7):
        put(store, range(1000 * segment, 1000 * segment + PER_SEGMENT))
    assert store.find([key_of(0)]) == 1

    put(store, range(10_000, 10_000 + 2 * PER_SEGMENT))

    firsts = [1000 * segment for segment in range(7)]
    assert alive(store, firsts) == [0, *firsts[3:]]
    assert sum(path.stat().st_size for path in files(tmp_path, "kv")) <= LIMIT
    store.close()


def test_a_smaller_limit_holds_from_the_start(tmp_path):
    store = open_store(tmp_path)
    for segment in range(5):
        put(store, range(1000 * segment, 1000 * segment + PER_SEGMENT))
    store.close()

    store = open_store(tmp_path, limit_bytes=3 * SEGMENT)

    assert alive(store, range(0, 5000, 1000)) == [3000, 4000]
    store.close()


def test_a_clock_that_is_set_back_does_not_change_the_order(tmp_path):
    store = open_store(tmp_path)
    for segment in range(7):
        put(store, range(1000 * segment, 1000 * segment + PER_SEGMENT))
    store.close()
    store = open_store(tmp_path, wall_ns=lambda: 0)
    assert store.find([key_of(0)]) == 1

    put(store, range(10_000, 10_000 + 2 * PER_SEGMENT))

    assert alive(store, [0]) == [0] and alive(store, [1000]) == []
    store.close()


def test_a_hot_record_of_a_dying_segment_is_copied(tmp_path):
    store = open_store(tmp_path)
    put(store, range(PER_SEGMENT))
    for _ in range(2):
        got(store, [3])

    for segment in range(1, 9):
        put(store, range(1000 * segment, 1000 * segment + PER_SEGMENT))

    assert alive(store, range(PER_SEGMENT)) == [3]
    store.close()


def test_records_of_other_identities_are_evicted_as_well(tmp_path):
    old = open_store(tmp_path)
    put(old, range(4 * PER_SEGMENT))
    old.close()

    new = open_store(tmp_path, b"\2" * 32)
    put(new, range(8 * PER_SEGMENT))
    new.close()

    assert sum(path.stat().st_size for path in files(tmp_path, "")) <= LIMIT + 65536
    old = open_store(tmp_path)
    assert alive(old, range(4 * PER_SEGMENT)) == []
    old.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_nothing_more_ends_writing_with_one_warning(tmp_path, error, caplog):
    def fill(fd: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > 3 * RECORD:
            os.pwrite(fd, data[:100], offset)
            raise OSError(error, os.strerror(error))
        return os.pwrite(fd, data, offset)

    store = open_store(tmp_path, write=fill)

    assert put(store, [1, 2]) == 2
    assert put(store, [3, 4]) == 0 and put(store, [5]) == 0
    assert not store.writes
    assert [
        record.message for record in caplog.records if os.strerror(error) in record.message
    ] == caplog.messages
    assert len(caplog.messages) == 1 and str(tmp_path) in caplog.text
    assert alive(store, [1, 2, 3]) == [1, 2]
    store.close()
    assert files(tmp_path, ".open")[0].stat().st_size == 2 * RECORD


def test_segments_that_cannot_be_evicted_leave_no_room(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path, limit_bytes=LIMIT)
    monkeypatch.setattr(segment_store, "_allowed_bytes", lambda *_: SEGMENT // 2)

    assert put(store, [1]) == 0
    assert "nothing more is stored there until a restart: 0 MiB are used, and 0 MiB may be" in caplog.text
    store.close()


def test_half_of_the_free_space_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.undo()
    free = os.statvfs(tmp_path)
    free_bytes = free.f_bavail * free.f_frsize

    allowed = segment_store._allowed_bytes(tmp_path, 1 << 60, 0)

    assert abs(allowed - free_bytes // 2) < 1 << 30
    assert segment_store._allowed_bytes(tmp_path, 1000, 0) == 1000


# ---------------------------------------------------------------- several engines


def test_two_engines_write_their_own_and_read_what_the_other_has_written(tmp_path, stores):
    first, second = open_store(tmp_path), open_store(tmp_path)
    stores += first, second
    put(first, range(PER_SEGMENT + 1))
    put(second, range(1000, 1000 + PER_SEGMENT + 1))

    assert len(files(tmp_path, ".open")) == 2
    assert second.find(map(key_of, range(PER_SEGMENT + 1))) == PER_SEGMENT + 1
    assert got(second, range(PER_SEGMENT + 1)) == list(range(PER_SEGMENT + 1))
    assert first.find(map(key_of, range(1000, 2000))) == PER_SEGMENT + 1

    first.close()
    third = open_store(tmp_path)
    stores.append(third)
    assert alive(third, [PER_SEGMENT]) == [PER_SEGMENT]
    assert len(files(tmp_path, ".open")) == 2, "it goes on with that of the first one"


def test_each_record_of_another_engine_is_found_once_it_is_written(tmp_path, stores):
    first, second = open_store(tmp_path), open_store(tmp_path)
    stores += first, second
    for number in range(3 * PER_SEGMENT // 2):
        put(first, [number])
        assert second.find([key_of(number)]) == 1 and got(second, [number]) == [number]
        put(second, [-1 - number])
    assert first.find(map(key_of, range(-1, -1 - number, -1))) == number
    assert first.find(map(key_of, range(number))) == number, "its own"


@pytest.mark.parametrize("is_first", [True, False])
def test_replicas_find_what_each_of_them_had_stored_before_a_restart(tmp_path, stores, is_first):
    """Whichever of them opens the folder first."""
    for number, store in enumerate([open_store(tmp_path), open_store(tmp_path)]):
        put(store, [number])
        stores.append(store)
    for store in stores:
        store.close()

    opened = [open_store(tmp_path), open_store(tmp_path)]
    stores += opened
    replica = opened[not is_first]
    put(opened[is_first], [2])
    assert replica.find(map(key_of, [0, 1, 2])) == 3
    assert got(replica, [0, 1, 2]) == [0, 1, 2]


def test_a_record_that_another_engine_has_written_in_part_is_no_record(tmp_path, stores):
    def write(fd: int, data: memoryview, offset: int) -> int:
        if offset < RECORD:
            return os.pwrite(fd, data, offset)
        os.pwrite(fd, data[: len(data) // 2], offset)
        raise Killed

    second, first = open_store(tmp_path), open_store(tmp_path, write=write)
    put(first, [1])
    with pytest.raises(Killed):
        put(first, [2])
    assert second.find(map(key_of, [1, 2])) == 1
    first.close()
    third = open_store(tmp_path)
    put(third, [3, 4])
    stores += second, third
    assert second.find([key_of(4)]) == 1
    assert alive(second, [1, 2, 3, 4]) == [1, 3, 4]


@pytest.mark.parametrize("number", [1, 2 * PER_SEGMENT + 1])
def test_what_is_forgotten_does_not_come_back_with_the_segments_of_another_engine(tmp_path, stores, number):
    first, second = open_store(tmp_path), open_store(tmp_path)
    old = range(number)
    put(first, old)
    put(second, [900])
    assert second.find(map(key_of, old)) == number

    second.forget()

    assert alive(second, [*old, 900]) == []
    assert alive(first, [*old, 900]) == [], "the other engine forgets, too"
    new = range(1000, 1000 + 2 * PER_SEGMENT + 1)
    put(first, new)  # seals segments
    second.find([])
    assert alive(second, [*old, 900, *new]) == list(new)
    first.close()
    stores += second, open_store(tmp_path)  # goes on with an open segment
    assert alive(stores[-1], [*old, 900, *new]) == list(new)


def test_a_segment_may_be_forgotten_while_it_is_sealed(tmp_path, stores):
    first, second = open_store(tmp_path), open_store(tmp_path)
    stores += first, second
    put(first, range(PER_SEGMENT))
    seal = Path.rename

    def forget_first(path: Path, target: Path) -> Path:
        second.forget()
        return seal(path, target)

    with mock.patch.object(Path, "rename", forget_first):
        put(first, [900])

    assert first.writes
    second.find([])
    for store in (first, second):
        assert alive(store, [*range(PER_SEGMENT), 900]) == [900]


def test_a_segment_may_be_sealed_while_it_is_forgotten(tmp_path, stores):
    first, second = open_store(tmp_path), open_store(tmp_path)
    stores += first, second
    put(first, range(PER_SEGMENT))
    delete = Path.unlink

    def seal_first(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".open" and path.exists():
            path.rename(path.with_suffix(".kv"))
        delete(path, missing_ok)

    with mock.patch.object(Path, "unlink", seal_first):
        second.forget()

    assert files(tmp_path, ".kv") == files(tmp_path, ".open") == []


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/*") if path.suffix != ".json")


def test_used_bytes_are_those_of_all_files(tmp_path, stores):
    store = open_store(tmp_path)
    for number in range(3 * PER_SEGMENT):
        put(store, [number])
        indices = bytes_on_disk(tmp_path) - store.used_bytes
        assert 0 <= indices < 3 * (PER_SEGMENT + 1) * 40, "but for the indices of sealed segments"
    store.close()
    stores.append(open_store(tmp_path))
    assert stores[0].used_bytes == bytes_on_disk(tmp_path)
    stores[0].forget()
    assert stores[0].used_bytes == 0


def test_a_segment_that_the_other_engine_evicts_is_a_miss(tmp_path, stores):
    first, second = open_store(tmp_path), open_store(tmp_path)
    stores += first, second
    put(first, range(7 * PER_SEGMENT))
    assert second.find([key_of(0)]) == 1
    assert second.find([key_of(PER_SEGMENT)]) == 1

    put(first, range(10_000, 10_000 + 7 * PER_SEGMENT))

    assert got(second, [0]) == []
    assert second.find([key_of(PER_SEGMENT)]) == 0
    assert second.writes and first.writes


def test_forgetting_leaves_nothing(tmp_path):
    store = open_store(tmp_path)
    put(store, range(2 * PER_SEGMENT + 1))

    store.forget()

    assert len(store) == 0 and files(tmp_path, ".kv") == files(tmp_path, ".open") == []
    put(store, [1])
    assert alive(store, [0, 1]) == [1]
    store.close()


@pytest.mark.slow
def test_a_hundred_thousand_small_records(tmp_path):
    store = SegmentStore(tmp_path, IDENTITY, {}, 1 << 40)
    buffer = RecordBuffer(1000, 100)
    for begin in range(0, 100_000, 1000):
        assert store.write([key_of(number) for number in range(begin, begin + 1000)], buffer) == 1000
    store.close()

    store = SegmentStore(tmp_path, IDENTITY, {}, 1 << 40)

    assert store.find(map(key_of, range(100_000))) == 100_000
    store.close()


# ---------------------------------------------------------------- at start


def test_a_usable_folder_is_made(tmp_path):
    check_folder(tmp_path / "a" / "b", LIMIT)

    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"kv_disk is {path}, which is or is in a file; name a folder"):
            check_folder(path, LIMIT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(
        ConfigError, match="cannot be made and locked there: Permission denied; name another folder"
    ):
        check_folder(tmp_path, LIMIT)


def test_a_read_only_file_system_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be made and locked there: .*; name another folder"):
        check_folder(Path("/proc/kv"), LIMIT)


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_store, "_allowed_bytes", lambda *_: 20 << 20)
    with pytest.raises(
        ConfigError, match="where 40 MiB are free or its own; .* a file of it has 64 MiB; make room"
    ):
        check_folder(tmp_path, 8 << 30)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))
