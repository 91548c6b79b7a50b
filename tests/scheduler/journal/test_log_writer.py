"""Writing decision logs: whose files they are, and what happens when they cannot be written."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.runtime.config.setting_declaration import MAX_INT
from engine.runtime.errors import ConfigError
from engine.scheduler.journal.log_file import MAX_RECORD_BYTES, Idle, LogRecord, read_runs
from engine.scheduler.journal.log_writer import LogWriter, header_of
from engine.scheduler.records.decision_log import Settled
from tests.scheduler.journal.log_samples import count_writes, sample_header


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.log"


def read_last(path: Path) -> list[LogRecord]:
    return [list(run.records) for run in read_runs(path)][-1]


def test_the_header_has_no_password_of_a_store():
    config = EngineConfig(cache=CacheConfig(kv_store="redis://me:secret@localhost:1/2"))
    header = header_of(config, sample_header().capacity, frozenset(), wall_s=0.0, now_s=0.0)
    assert b"secret" not in msgspec.msgpack.encode(header)
    assert header.cache_config().kv_store == "redis://localhost:1/2"


def test_only_the_owner_may_read_it(path):
    LogWriter(path, sample_header()).close()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_becomes_its_owners(path):
    LogWriter(path, sample_header()).close()
    path.chmod(0o644)

    LogWriter(path, sample_header()).close()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_can_read_and_that_is_not_ours_is_refused(path, monkeypatch):
    path.touch(0o644)
    path.chmod(0o644)

    def not_ours(_fd: int, _mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", not_ours)

    with pytest.raises(ConfigError, match="others than its owner can read"):
        LogWriter(path, sample_header())
    assert path.stat().st_size == 0


def test_a_disk_without_locks_is_not_another_writer(path, monkeypatch):
    def no_locks(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    with pytest.raises(ConfigError, match=r"cannot be locked \(No locks available\)"):
        LogWriter(path, sample_header())


def test_what_was_flushed_survives_the_writer(path):
    writer = LogWriter(path, sample_header())
    writer.add(Idle(1.0))
    writer.flush()
    writer.add(Idle(2.0))

    assert read_last(path) == [Idle(1.0)]
    writer.close()


def test_what_was_flushed_survives_a_kill(path):
    code = (
        "import os, signal, sys\n"
        "from engine.runtime.config.engine_config import EngineConfig\n"
        "from engine.runtime.feasibility import Capacity\n"
        "from engine.scheduler.journal.log_file import Idle\n"
        "from engine.scheduler.journal.log_writer import LogWriter, header_of\n"
        "header = header_of(EngineConfig(), Capacity(1, 1, 1, 1, 1), frozenset(), wall_s=0.0, now_s=0.0)\n"
        "writer = LogWriter(sys.argv[1], header)\n"
        "writer.add(Idle(1.0)); writer.flush(); writer.add(Idle(2.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)

    assert done.returncode == -signal.SIGKILL
    assert read_last(path) == [Idle(1.0)]
    LogWriter(path, sample_header()).close()  # the lock went with the process


def test_a_flush_is_one_call_of_the_system(path, monkeypatch):
    writer = LogWriter(path, sample_header())
    writes = count_writes(monkeypatch)

    for idx in range(10):
        writer.add(Idle(float(idx)))
    writer.flush()
    writer.flush()
    writer.close()

    assert len(writes) == 1
    assert len(read_last(path)) == 10


def test_a_file_of_somebody_else_is_left_alone(path):
    path.write_text("my thesis")

    with pytest.raises(ConfigError, match="exists and is no decision log; name another file"):
        LogWriter(path, sample_header())

    assert path.read_text() == "my thesis"


def test_an_empty_file_is_taken(path):
    path.touch()

    LogWriter(path, sample_header()).close()

    assert read_last(path) == []


@pytest.mark.parametrize("name", [".", "no/such/folder"])
def test_what_cannot_be_written_is_said_at_start(tmp_path, name):
    with pytest.raises(ConfigError, match="decision_log is .*, which cannot be written"):
        LogWriter(tmp_path / name, sample_header())


def test_a_pipe_is_refused_and_nobody_hangs(path):
    os.mkfifo(path)

    with pytest.raises(ConfigError, match="is not a regular file"):
        LogWriter(path, sample_header())


def test_two_writers_do_not_mix(path):
    first = LogWriter(path, sample_header())

    with pytest.raises(ConfigError, match="another process is writing"):
        LogWriter(path, sample_header())

    first.close()
    LogWriter(path, sample_header()).close()
    assert len(list(read_runs(path))) == 2


def test_a_full_disk_costs_one_warning_and_the_rest_of_the_log(path, monkeypatch, caplog):
    writer = LogWriter(path, sample_header())
    writer.add(Idle(1.0))
    writer.flush()

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(5):
        writer.add(Idle(2.0))
        writer.flush()
    monkeypatch.undo()
    writer.add(Idle(3.0))
    writer.close()

    (message,) = caplog.messages
    assert "decision log stops here" in message and "No space left on device" in message
    assert read_last(path) == [Idle(1.0)]


def test_half_a_write_is_the_end_too(path, monkeypatch, caplog):
    writer = LogWriter(path, sample_header())
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    writer.add(Idle(1.0))
    writer.flush()
    writer.add(Idle(2.0))
    writer.close()
    monkeypatch.undo()

    assert len(caplog.messages) == 1
    assert read_last(path) == []
    LogWriter(path, sample_header()).close()
    assert len(list(read_runs(path))) == 2


def test_a_record_that_no_reader_would_take_is_not_written(path, caplog):
    writer = LogWriter(path, sample_header())
    writer.add(Settled(1.0, 1, next_token_ids=bytes(MAX_RECORD_BYTES)))
    writer.close()

    assert "the limit is" in caplog.text
    assert read_last(path) == []


@pytest.mark.parametrize("name", ["policy_seed", "look_ahead", "max_queued_requests", "chunked_prefill_size"])
def test_a_number_that_no_record_can_hold_is_refused_with_the_settings(path: Path, name: str) -> None:
    too_large: dict[str, Any] = {name: MAX_INT + 1}
    largest: dict[str, Any] = {name: MAX_INT}

    with pytest.raises(ConfigError, match=f"{name} is {MAX_INT + 1}, but it must be at most {MAX_INT}"):
        SchedulerConfig(**too_large)

    config = EngineConfig(scheduler=SchedulerConfig(**largest))
    header = header_of(config, sample_header().capacity, frozenset(), wall_s=0.0, now_s=0.0)
    LogWriter(path, header).close()
    (run,) = read_runs(path)
    assert getattr(run.header.scheduler_config(), name) == MAX_INT


@pytest.mark.parametrize(("served", "shown"), [(None, "default"), ("org/tiny", "org/tiny"), ("*", "default")])
def test_a_run_has_the_name_of_the_model_in_the_api(served: str | None, shown: str) -> None:
    """`serve` resolves the name of the default model before the scheduler starts."""
    config = EngineConfig(model=ModelConfig(served_model_name=served))
    header = header_of(config, sample_header().capacity, frozenset(), wall_s=0.0, now_s=0.0)
    assert header.model == shown
