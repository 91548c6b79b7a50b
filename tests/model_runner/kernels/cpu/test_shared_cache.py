"""What Linux says of the caches, and what it may leave out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.model_runner.kernels.cpu.shared_cache import shared_cache_bytes

MIB = 1 << 20


def describe(root: Path, cpu: int, level: str, size: str, shared: str) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{level}"
    folder.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("size", "shared", "cpus", "expected"),
    [
        ("32768K", "0-1", {0, 1}, 32 * MIB),
        ("32M", "0-7,64-71", {3, 65}, 32 * MIB),
        ("32768K", "0-7", {0, 8}, 0),  # the other one has its own
        ("32768K", "0", {0}, 32 * MIB),
        ("lots", "0-1", {0, 1}, 0),
        ("32768", "0-1", {0, 1}, 0),
        ("32768K", "all", {0, 1}, 0),
    ],
)
def test_the_third_level(tmp_path, size, shared, cpus, expected):
    first = min(cpus)
    describe(tmp_path, first, "1", "48K", str(first))
    describe(tmp_path, first, "2", "1024K", str(first))
    describe(tmp_path, first, "3", size, shared)
    assert shared_cache_bytes(tmp_path, frozenset(cpus)) == expected


def test_no_third_level(tmp_path):
    describe(tmp_path, 0, "2", "1024K", "0-3")
    assert shared_cache_bytes(tmp_path, frozenset({0, 1})) == 0
    assert shared_cache_bytes(tmp_path / "nothing", frozenset({0})) == 0


def test_this_machine():
    cpu = min(os.sched_getaffinity(0))
    cache = Path(f"/sys/devices/system/cpu/cpu{cpu}/cache/index3")
    if not cache.exists():
        pytest.skip("Linux does not describe a third level here")
    shared = (cache / "shared_cpu_list").read_text().strip()
    if shared != f"0-{len(os.sched_getaffinity(0)) - 1}":
        pytest.skip("this process may use other CPUs than those that share it")
    assert shared_cache_bytes() == int((cache / "size").read_text().strip()[:-1]) << 10
