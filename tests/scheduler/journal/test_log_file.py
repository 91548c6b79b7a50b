"""Reading decision logs: whole ones, broken ones, and files that are none."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.runtime.errors import ConfigError
from engine.scheduler.journal.log_file import (
    MAGIC,
    RECORD_HEAD,
    RUN_HEAD,
    VERSION,
    Input,
    LogFileError,
    LogRecord,
    read_runs,
)
from engine.scheduler.journal.log_writer import LogWriter
from engine.scheduler.records.decision_log import Arrived, PassRecord, Settled
from tests.scheduler.journal.log_samples import sample_header, sample_records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.log"


def write_run(path: Path, records: list[LogRecord]) -> None:
    writer = LogWriter(path, sample_header())
    for record in records:
        writer.add(record)
    writer.close()


def read_all(path: Path) -> list[tuple[list[LogRecord], str]]:
    return [(list(run.records), run.damage) for run in read_runs(path)]


def test_what_was_written_is_read(path):
    write_run(path, sample_records())

    (run,) = read_runs(path)

    assert run.header == sample_header()


def test_every_field_of_every_record_comes_back(path):
    write_run(path, sample_records())

    assert read_all(path) == [(sample_records(), "")]


def test_runs_follow_each_other(path):
    write_run(path, sample_records())
    write_run(path, sample_records()[:2])

    assert read_all(path) == [(sample_records(), ""), (sample_records()[:2], "")]


def test_a_run_that_is_not_read_is_passed_over(path):
    write_run(path, sample_records())
    write_run(path, sample_records()[:1])

    first_of_each = [next(run.records) for run in read_runs(path)]

    assert first_of_each == [sample_records()[0]] * 2


def test_decisions_tell_the_story_without_the_calls(path):
    write_run(path, sample_records())

    (decisions,) = [list(run.decisions) for run in read_runs(path)]

    assert [type(record) for record in decisions] == [Arrived, PassRecord, Settled, Settled]


def test_wherever_it_is_cut_what_came_before_is_read(path):
    write_run(path, [])
    start = path.stat().st_size
    path.unlink()
    write_run(path, sample_records())
    data, records = path.read_bytes(), sample_records()

    lengths = []
    for end in range(start, len(data)):
        path.write_bytes(data[:end])
        ((read, damage),) = read_all(path)
        assert read == records[: len(read)]
        assert not damage or "the file ends inside a record" in damage
        lengths.append((len(read), bool(damage)))

    assert lengths == sorted(lengths)
    assert {length for length, _damage in lengths} == set(range(len(records)))


@pytest.mark.parametrize("bit", [0, 7])
def test_whatever_byte_is_damaged_the_next_run_is_read(path, bit):
    write_run(path, [])
    start = path.stat().st_size
    path.unlink()
    write_run(path, sample_records())
    end = path.stat().st_size
    write_run(path, sample_records()[:3])
    data, records = path.read_bytes(), sample_records()

    for at in range(start, end):
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        (first, note), second = read_all(path)
        assert first == records[: len(first)]
        assert len(first) < len(records)
        assert f"{path}: " in note and "the rest of the run is lost" in note
        assert second == (records[:3], "")


def test_a_run_begun_after_a_crash_is_read(path):
    write_run(path, sample_records())
    path.write_bytes(path.read_bytes()[:-3])
    write_run(path, sample_records())

    (crashed, note), second = read_all(path)

    assert crashed == sample_records()[:-1]
    assert note
    assert second == (sample_records(), "")


def test_a_run_that_ended_inside_its_header_is_passed_over(path):
    write_run(path, sample_records())
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + whole)

    assert read_all(path) == [(sample_records(), "")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a decision log"),
        (b"token ids\n" * 100, "is not a decision log"),
        (MAGIC, "has no run that can be read"),
        (MAGIC + struct.pack("<I", VERSION) + b"\5\0\0\0", "has no run that can be read"),
        (MAGIC + struct.pack("<I", VERSION + 1), f"is a decision log of version {VERSION + 1}"),
    ],
)
def test_other_files_are_refused_in_one_line(path, data, message):
    path.write_bytes(data)

    with pytest.raises(LogFileError, match=message) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(path):
    with pytest.raises(LogFileError, match="cannot be read: No such file or directory"):
        read_all(path)


def test_a_huge_log_is_read_in_little_memory(path):
    writer = LogWriter(path, sample_header())
    for step_id in range(400):
        writer.add(Settled(1.0, step_id, next_token_ids=bytes(50_000)))
        writer.flush()
    writer.close()

    tracemalloc.start()
    count = sum(1 for run in read_runs(path) for _record in run.records)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert count == 400
    assert peak < 1_000_000 < path.stat().st_size


def test_the_settings_of_a_run_can_be_changed():
    header = sample_header()

    changed = header.scheduler_config(schedule_policy="lpm")

    assert header.scheduler_config().schedule_policy == "fcfs"
    assert changed.schedule_policy == "lpm"
    with pytest.raises(ConfigError, match="look_ahead is -1"):
        header.scheduler_config(look_ahead=-1)


def test_a_setting_that_this_engine_does_not_have_is_named():
    header = sample_header()
    header.scheduler["warp_factor"] = 9

    with pytest.raises(LogFileError, match="setting warp_factor"):
        header.scheduler_config()


def test_a_record_of_a_kind_that_came_later_ends_the_run(path):
    write_run(path, sample_records()[:1])
    payload = b"\x91\xa7warped!"
    path.write_bytes(path.read_bytes() + struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)

    ((records, damage),) = read_all(path)

    assert isinstance(records[0], Input)
    assert "does not understand" in damage


def write_payload(path: Path, payload: bytes) -> None:
    """A file of one run, whose header is these bytes."""
    head = RECORD_HEAD.pack(len(payload), zlib.crc32(payload))
    path.write_bytes(RUN_HEAD.pack(MAGIC, VERSION) + head + payload)


def test_a_file_that_grows_between_two_runs_is_read_as_it_was(path):
    writer = LogWriter(path, sample_header())
    writer.flush()
    runs = read_runs(path)
    first = next(runs)
    assert list(first.records) == []

    for record in sample_records():
        writer.add(record)
    writer.close()

    assert next(runs, None) is None
    assert first.damage == ""
    assert read_all(path) == [(sample_records(), "")]


def test_a_run_that_begins_while_the_file_is_read_is_for_the_next_reader(path):
    write_run(path, sample_records())
    runs = read_runs(path)
    next(runs)

    write_run(path, sample_records())

    assert next(runs, None) is None
    assert len(read_all(path)) == 2


def test_bytes_between_two_runs_are_no_run(path):
    write_run(path, sample_records())
    first = path.stat().st_size
    write_run(path, sample_records()[:2])
    data = bytearray(path.read_bytes())
    data[first] ^= 1  # of the magic

    path.write_bytes(data)

    ((records, damage),) = read_all(path)
    assert records == sample_records()
    assert f"at byte {first:,}" in damage


def test_a_run_without_a_header_is_reported(path):
    write_run(path, sample_records())
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + whole)
    lost: list[str] = []

    assert len(list(read_runs(path, lost.append))) == 1
    assert lost == [f"{path}: a run is lost: damaged at byte 0"]


def test_lists_within_lists_without_end_are_damage(path):
    payload = b"\x91" * 200_000 + b"\xc0"
    write_run(path, sample_records()[:2])
    with path.open("ab") as file:
        file.write(RECORD_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)

    ((records, damage),) = read_all(path)

    assert records == sample_records()[:2]
    assert "does not understand" in damage


@pytest.mark.parametrize("name", ["page_size", "num_pages", "vocab_size"])
def test_a_header_of_no_scheduler_is_refused(path, name):
    header = sample_header()
    header.capacity = msgspec.structs.replace(header.capacity, **{name: 0})
    write_payload(path, msgspec.msgpack.encode(header))
    lost: list[str] = []

    with pytest.raises(LogFileError, match="has no run that can be read"):
        list(read_runs(path, lost.append))
    assert f"its {name} is 0" in lost[0]


@pytest.mark.parametrize(("name", "value"), [("max_running_requests", "lots"), ("schedule_policy", 3)])
def test_a_setting_of_another_type_is_named(name, value):
    header = sample_header()
    header.scheduler[name] = value

    with pytest.raises(LogFileError, match=f"are not those of this one .*{name}"):
        header.scheduler_config()


def test_a_setting_that_was_renamed_is_read_under_its_new_name():
    header = sample_header()
    del header.scheduler["multi_step_ms"]
    header.scheduler["decode_burst_ms"] = 25.0

    assert header.scheduler_config().multi_step_ms == 25.0
    assert header.scheduler_config(multi_step_ms=0.0).multi_step_ms == 0.0


def test_a_setting_that_came_later_has_its_default():
    header = sample_header()
    del header.scheduler["phases"]

    assert header.scheduler_config() == sample_header().scheduler_config()


def test_settings_survive_the_file(path):
    changed: dict[str, Any] = {"schedule_policy": "lpm", "queue_timeout": 2, "policy_seed": 2**63 - 1}
    header = sample_header()
    header.scheduler |= changed
    LogWriter(path, header).close()

    (run,) = read_runs(path)

    assert run.header.scheduler_config() == sample_header().scheduler_config(**changed)


def test_a_pipe_is_refused_and_nobody_hangs(path):
    os.mkfifo(path)

    with pytest.raises(LogFileError, match="not a regular file"):
        read_all(path)
