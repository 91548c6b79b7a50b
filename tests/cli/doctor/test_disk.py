"""The checks of `--kv-disk` and `--kv-store`: a place that can be used, its rates, and one that cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.cli import main as cli
from engine.cli.doctor import disk
from engine.cli.doctor.check import CheckStatus
from engine.cli.doctor.disk import check_disk, check_kv_store, measure_disk
from engine.runtime.config.engine_config import CacheConfig
from engine.scheduler.kv_stores import remote_store, segment_store
from engine.scheduler.kv_stores.store_client import WritesRefusedError

LIMIT = 1 << 20
KV_TOKEN_BYTES = 23_040


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(disk, "_MOST_BYTES", 8 << 20)


def test_rates_and_the_costs_of_a_prefix(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "measure_disk", lambda _root: (64 << 20, 256 << 20))
    root = tmp_path / "kv"

    check = check_disk(root, LIMIT, KV_TOKEN_BYTES)

    assert check.verdict is CheckStatus.OK
    assert check.text == (
        f"{root}: writes 64 MiB/s, reads 256 MiB/s; a prefix of 4,000 tokens is 88 MiB: 1.37 s to store, 0.34 s to load"
    )
    assert not root.exists(), "it leaves nothing"


def test_without_a_model_only_the_disk_is_measured(tmp_path):
    check = check_disk(tmp_path, LIMIT, 0)

    assert check.verdict is CheckStatus.OK and check.text.endswith("/s")
    assert check.details["write_bytes_per_s"] > 0 and check.details["read_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_written_is_read(tmp_path, monkeypatch):
    read = []
    real = os.pread

    def count(fd: int, num_bytes: int, offset: int) -> bytes:
        read.append(num_bytes)
        return real(fd, num_bytes, offset)

    monkeypatch.setattr(os, "pread", count)

    measure_disk(tmp_path)

    assert read == [4 << 20, 4 << 20]


@pytest.mark.parametrize("folder", ["file", "/proc/kv"])
def test_a_folder_that_cannot_be_used_fails(tmp_path, folder):
    (tmp_path / "file").write_bytes(b"")

    check = check_disk(tmp_path / folder, LIMIT, KV_TOKEN_BYTES)

    assert check.verdict is CheckStatus.FAIL and "--kv-disk" in check.fix


def test_a_disk_that_is_full_fails(tmp_path, monkeypatch):
    def fill(_root: Path) -> tuple[float, float]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "measure_disk", fill)
    assert check_disk(tmp_path, LIMIT, 0).verdict is CheckStatus.FAIL
    monkeypatch.setattr(segment_store, "_allowed_bytes", lambda *_: 0)
    assert "make room there" in check_disk(tmp_path, LIMIT, 0).fix


def test_the_line_of_the_command(capsys, good_machine, tiny_model, tmp_path):
    arguments = ["doctor", str(tiny_model), "--kv-disk", str(tmp_path), "--kv-disk-size", "0.001"]

    assert cli.run(arguments) == 0

    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "kv_disk")
    assert line.startswith(f"ok   kv_disk    {tmp_path}: writes ") and line.endswith(" s to load")


class SmallServer:
    """A server with room for some values; `evicts`: it takes more, and loses all."""

    def __init__(self, room: int, *, evicts: bool) -> None:
        self.room, self.evicts = room, evicts
        self.values: dict[str, bytes] = {}

    def put(self, names: list[str], values: list[bytes]) -> None:
        if len(self.values) == self.room:
            if not self.evicts:
                raise WritesRefusedError("out of memory")
            self.values.clear()
        self.values |= zip(names, values, strict=True)

    def get(self, names: list[str], num_bytes: int) -> list[bytes | None]:
        return [self.values.get(name) for name in names]

    def remove(self, name: str) -> None:
        self.values.pop(name, None)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("evicts", "words"), [(False, "out of memory"), (True, "it loses what is written")])
def test_a_store_without_room_is_refused_and_keeps_nothing(monkeypatch, evicts, words):
    server = SmallServer(1, evicts=evicts)
    monkeypatch.setattr(remote_store, "open_client", lambda _address: server)

    check = check_kv_store(CacheConfig(kv_store="redis://localhost"), KV_TOKEN_BYTES)

    assert check.verdict is CheckStatus.FAIL and words in check.text + check.fix
    assert not server.values
