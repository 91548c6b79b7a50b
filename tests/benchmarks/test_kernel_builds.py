"""`kernel_builds`: a build is kept, compared with itself, and asked for when it is missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from engine.model_runner.kernels.cpu.library import reasons_against_library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kernel_builds(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("path")
    (folder / "benchmarks").symlink_to(BENCHMARKS, target_is_directory=True)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("benchmarks.kernel_builds")


def run(kernel_builds: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel_builds.py", *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        kernel_builds.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(bool(reasons_against_library()), reason="no compiler")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_build_beside_itself(
    kernel_builds: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kv_dtype: str,
) -> None:
    for name in ("before", "after"):
        run(kernel_builds, monkeypatch, "--folder", tmp_path, "keep", name)
        assert Path(capsys.readouterr().out.strip()) == tmp_path / f"{name}.so"
    small = ["--requests", 3, "--length", 40, "--layers", 2, "--rounds", 2, "--threads", 1]
    names = ["before", "after", "--kv-dtype", kv_dtype, "--cold"]
    run(kernel_builds, monkeypatch, "--folder", tmp_path, "compare", *names, *small)
    header, before, after = capsys.readouterr().out.splitlines()
    assert header.split() == ["build", "ns", "a", "key", "ratio", "quartiles"]
    assert before.split()[0] == "before" and before.split()[2:] == ["1.000", "1.000", "to", "1.000"]
    assert after.split()[0] == "after" and float(after.split()[1]) > 0


def test_a_build_that_is_missing(
    kernel_builds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"nowhere\.so[\s\S]*kernel_builds\.py keep NAME"):
        run(kernel_builds, monkeypatch, "--folder", tmp_path, "compare", "nowhere", "--requests", 2)


def test_decodes_have_their_own_slots(kernel_builds: ModuleType) -> None:
    decodes = kernel_builds.make_decodes(7, 300)
    mine = [row[:length] for row, length in zip(decodes.table, decodes.lengths, strict=True)]
    slots = np.concatenate(mine)
    assert len(set(slots.tolist())) == len(slots) == decodes.lengths.sum()
    assert (
        slots.min() >= kernel_builds.PAGE_SIZE
        and slots.max() < (decodes.num_pages + 1) * kernel_builds.PAGE_SIZE
    )
    assert all(150 <= length <= 450 for length in decodes.lengths)


def test_ratios_are_taken_within_a_round(kernel_builds: ModuleType) -> None:
    seconds = np.array([[1.0, 0.5], [10.0, 5.0], [2.0, 1.0]])
    lines = kernel_builds.report(["one", "other"], seconds, 1_000_000_000)
    assert lines[1].split() == ["one", "2.00", "1.000", "1.000", "to", "1.000"]
    assert lines[2].split() == ["other", "1.00", "0.500", "0.500", "to", "0.500"]
