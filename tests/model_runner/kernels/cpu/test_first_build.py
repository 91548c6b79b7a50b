"""When the kernels are compiled ahead of a start, and that it needs no torch to decide."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.launch.startup_display import COMPILE_STEP
from engine.model_runner.kernels.cpu import build
from engine.model_runner.kernels.cpu.build import compile_ahead
from engine.model_runner.kernels.cpu.compiler import best_isa, compiler_options


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A new cache folder and a compiler; compilations are recorded, not run."""
    started: list[list[str]] = []
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "best_isa", lambda: "avx2")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda command, **_options: started.append(command))
    return started


def steps_of(device: str) -> list[str]:
    steps: list[str] = []
    compile_ahead(device, steps.append)
    return steps


def test_a_first_start_compiles_in_a_step_of_its_own(commands: list[list[str]]) -> None:
    assert steps_of("cpu") == [COMPILE_STEP]
    assert commands == [[sys.executable, "-P", "-m", "engine.model_runner.kernels.cpu"]]


def test_a_later_start_does_not(commands: list[list[str]], tmp_path: Path) -> None:
    flags = (*build._OPTIONS, *compiler_options(best_isa()))
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / f"cpu-{best_isa()}-{'0' * 24}-abc.so").touch()  # of other sources
    assert not build.is_built()
    (folder / f"{build._stem(best_isa(), flags)}-abc.so").touch()
    assert build.is_built()
    assert steps_of("cpu") == []
    assert commands == []


def test_a_gpu_an_old_cpu_or_no_compiler_compile_nothing(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_of("cuda") == []
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert steps_of("cpu") == []
    monkeypatch.undo()
    monkeypatch.setattr(build, "best_isa", lambda: "portable")
    assert steps_of("cpu") == []
    assert commands == []


def test_the_decision_needs_no_torch() -> None:
    code = (
        "import sys; from engine.model_runner.kernels.cpu.build import is_built; is_built(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
