from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from engine.launch.child.socket_dir import SocketDir
from engine.runtime.errors import ConfigError


@pytest.fixture
def tmp(monkeypatch):
    """A short directory for temporary files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_is_private_and_goes_away_with_its_sockets(tmp):
    with SocketDir() as socket_dir:
        assert stat.S_IMODE(socket_dir.path.stat().st_mode) == 0o700
        assert socket_dir.endpoints().scheduler == f"ipc://{socket_dir.path}/scheduler.sock"
        (socket_dir.path / "scheduler.sock").touch()

    assert list(tmp.iterdir()) == []


def abandon(socket_dir: SocketDir) -> Path:
    """What the kernel leaves of an engine that was killed."""
    (socket_dir.path / "scheduler.sock").touch()
    os.close(socket_dir._lock_fd)
    return socket_dir.path


def test_sweeps_up_after_engines_that_were_killed_and_leaves_the_living_alone(tmp):
    abandoned = abandon(SocketDir())
    assert abandoned.exists()

    with SocketDir() as first, SocketDir() as second:
        assert set(tmp.iterdir()) == {first.path, second.path}


@pytest.mark.parametrize("name", ["engine-results", "engine-sockets-notes"])
@pytest.mark.parametrize("lock", [None, "", "4711\n"])
def test_never_touches_what_somebody_else_has_made(tmp, name, lock):
    theirs = tmp / name
    theirs.mkdir(mode=0o700)
    (theirs / "thesis.txt").write_text("years of work")
    if lock is not None:
        (theirs / "lock").write_text(lock)
    before = set(theirs.iterdir())

    with SocketDir():
        pass

    assert set(theirs.iterdir()) == before


def test_a_file_that_somebody_has_put_beside_the_sockets_survives(tmp):
    abandoned = abandon(SocketDir())
    (abandoned / "thesis.txt").write_text("years of work")
    (abandoned / "folder").mkdir()

    with SocketDir() as living:
        (living.path / "notes.txt").touch()

    assert {path.name for path in abandoned.iterdir()} == {"thesis.txt", "folder"}
    assert [path.name for path in living.path.iterdir()] == ["notes.txt"]


def test_a_path_too_long_for_sockets_is_refused_with_the_way_out(tmp, monkeypatch):
    deep = tmp / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    with pytest.raises(ConfigError, match="set TMPDIR to a shorter directory"):
        SocketDir()

    assert list(deep.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp / "absent"))

    with pytest.raises(ConfigError, match="absent"):
        SocketDir()


def test_sockets_and_the_meeting_point_of_ranks_go_away_too(tmp):
    with SocketDir() as socket_dir:
        endpoints = socket_dir.endpoints(ranks=range(1, 4))
        assert [name.rpartition("/")[2] for name in endpoints.model_runners] == [
            f"model_runner_{rank}.sock" for rank in (1, 2, 3)
        ]
        for path in (
            *(name.removeprefix("ipc://") for name in endpoints.model_runners),
            endpoints.rank_store,
            endpoints.kv_transfer.removeprefix("ipc://"),
        ):
            Path(path).touch()

    assert list(tmp.iterdir()) == []
