"""`kernel_builds`: a build is kept, compared with itself, and refused where it would mislead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from engine.model_runner.kernels.cpu.compiler import NoLibraryError
from engine.model_runner.kernels.cpu.isa import best_isa
from engine.model_runner.kernels.cpu.library import load_library

from .conftest import BENCHMARKS, run_benchmark


@pytest.fixture
def kernel_builds(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("kernel_builds")


def run(kernel_builds: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> None:
    run_benchmark(kernel_builds, monkeypatch, "--folder", folder, *arguments)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_build_beside_itself(
    kernel_builds: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kv_dtype: str,
) -> None:
    if reason := _reason_against_best():
        pytest.skip(reason)
    for name in ("before", "b"):
        run(kernel_builds, monkeypatch, tmp_path, "keep", name)
        assert Path(capsys.readouterr().out.strip()) == tmp_path / f"{name}.so"
    small = ["--requests", 3, "--length", 40, "--layers", 2, "--rounds", 2, "--threads", 1]
    run(
        kernel_builds,
        monkeypatch,
        tmp_path,
        "compare",
        "before",
        "b",
        "--kv-dtype",
        kv_dtype,
        "--cold",
        *small,
    )
    header, before, other = capsys.readouterr().out.splitlines()
    assert before.startswith("before ") and other.startswith("b ")
    assert before.endswith("the same") and other.endswith("the same")
    column = header.index("ratio") + len("ratio")
    assert before[:column].endswith(" 1.000") and float(other[:column].split()[-1]) > 0


def _reason_against_best() -> str | None:
    """`keep` compiles for the best level only, where the engine would take a lesser one."""
    try:
        load_library(best_isa())
    except NoLibraryError as error:
        return str(error)
    return None


def test_threads_spin_as_shortly_as_in_the_engine() -> None:
    """That is settled when torch is imported."""
    script = f"import sys; sys.path.append({str(BENCHMARKS.parent)!r}); import benchmarks.kernel_builds; "
    command = [sys.executable, "-c", script + "print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_build_that_is_missing(
    kernel_builds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=rf"no build 'nowhere'.*--folder {tmp_path} keep nowhere"):
        run(kernel_builds, monkeypatch, tmp_path, "compare", "nowhere", "--threads", 1)


def test_a_build_with_another_interface(
    kernel_builds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "old.so").touch()
    (tmp_path / "old.interface").write_text("another")
    with pytest.raises(SystemExit, match="build 'old' take other arguments"):
        run(kernel_builds, monkeypatch, tmp_path, "compare", "old", "--threads", 1)


def test_another_folders_sources_are_not_kept(
    kernel_builds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_builds, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="`engine` is the one in .*pip install -e"):
        run(kernel_builds, monkeypatch, tmp_path, "keep", "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["keep", "x/y"],
        ["keep", ""],
        ["keep", ".."],
        ["compare", "a", "--requests", "0"],
        ["compare", "a", "--length", "1"],
        ["compare", "a", "--layers", "0"],
        ["compare", "a", "--rounds", "-1"],
        ["compare", "a", "--threads", "two"],
    ],
)
def test_bad_arguments(
    kernel_builds: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(kernel_builds, monkeypatch, tmp_path, *arguments)
    assert stopped.value.code == 2
    assert repr(arguments[-1]) in capsys.readouterr().err


def test_results_that_differ_too_much(kernel_builds: ModuleType) -> None:
    right = torch.randn(4, 8)
    near, nothing, nan = right * 1.01, torch.zeros(4, 8), right * torch.nan
    assert kernel_builds.compare_results(["a", "b"], [right, near]) == [0.0, pytest.approx(0.01, rel=1e-3)]
    for wrong in (nothing, nan):
        with pytest.raises(kernel_builds.BuildError, match="results of b differ by .* from a"):
            kernel_builds.compare_results(["a", "b"], [right, wrong])


def test_decodes_have_their_own_slots(kernel_builds: ModuleType) -> None:
    decodes = kernel_builds.make_decodes(7, 300)
    mine = [row[:length] for row, length in zip(decodes.table, decodes.lengths, strict=True)]
    slots = np.concatenate(mine)
    assert len(set(slots.tolist())) == len(slots) == decodes.lengths.sum()
    assert slots.min() >= kernel_builds.PAGE_SIZE
    assert slots.max() < (decodes.num_pages + 1) * kernel_builds.PAGE_SIZE
    assert all(150 <= length <= 450 for length in decodes.lengths)


def test_ratios_are_taken_within_a_round(kernel_builds: ModuleType) -> None:
    seconds = np.array([[1.0, 2.0], [10.0, 5.0], [4.0, 4.0]])
    lines = kernel_builds.report(["one", "other"], [0.0, 0.01], seconds, 1_000_000_000)
    assert lines[1].split() == ["one", "4.00", "1.000", "1.000", "to", "1.000", "the", "same"]
    assert lines[2].split() == ["other", "4.00", "1.000", "0.750", "to", "1.500", "1.00%", "off"]
