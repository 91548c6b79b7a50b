"""Which servers run: the lock of the directory decides, and what killed ones leave is removed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.launch.child import socket_dir as server_record
from engine.launch.child.process_resources import tree_bytes
from engine.launch.child.socket_dir import ServerRecord, SocketDir, running_servers, write_record

RECORD = ServerRecord(4711, "org/tiny", "/models/tiny", "http://127.0.0.1:30000", 1000.0)


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory for temporary files, and for /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setattr(server_record, "_SHARED_TMP", Path(path))
        yield Path(path)


def test_servers_are_listed_oldest_first(tmp: Path) -> None:
    with SocketDir() as first, SocketDir() as second, SocketDir():
        write_record(first.path, ServerRecord(2, "b", "/b", "", 2.0))
        write_record(second.path, RECORD)
        write_record(second.path, ServerRecord(1, "a", "/a", "http://x", 1.0))
        assert [(server.pid, server.url) for server in running_servers()] == [(1, "http://x"), (2, "")]
    assert running_servers() == []
    assert list(tmp.iterdir()) == []  # the record goes with the directory


def test_what_a_killed_server_leaves_is_removed(tmp: Path) -> None:
    killed = SocketDir()
    write_record(killed.path, RECORD)
    (killed.path / "server.new").touch()  # it died while it wrote
    os.close(killed._lock_fd)
    with SocketDir() as running:
        write_record(running.path, RECORD)
        assert running_servers() == [RECORD]
        assert list(tmp.iterdir()) == [running.path]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}'])
def test_a_damaged_record_is_no_server(tmp: Path, content: bytes) -> None:
    with SocketDir() as socket_dir:
        (socket_dir.path / "server").write_bytes(content)
        assert running_servers() == []


def test_memory_of_a_tree(tmp_path: Path) -> None:
    for pid, parent, kib in ((10, 1, 100), (11, 10, 20), (12, 11, 3), (13, 1, 1000)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        (folder / "smaps_rollup").write_text(f"Rss: 9 kB\nPss:  {kib} kB\nPss_Dirty: 7 kB\n")
    (tmp_path / "11" / "smaps_rollup").unlink()  # of another user
    (tmp_path / "self").mkdir()
    assert tree_bytes(10, tmp_path) == 103 * 1024
    assert tree_bytes(99, tmp_path) == 0


def test_this_process_has_memory() -> None:
    assert tree_bytes(os.getpid()) > 1 << 20
