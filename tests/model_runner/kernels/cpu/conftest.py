"""The compiled kernels under test: those of this CPU in every run, those of lesser CPUs in slow ones, also
those of ARM, run by qemu (`guest.py`).

One more has AMX in plain C++ (`amx.h`), so that what is built on it is tested on every CPU.

With ENGINE_TEST_SANITIZE set the libraries are compiled with the address sanitizer: `test_sanitizer.py` runs the tests
once more in a process of that kind. The sanitizer does not see what tiles read, so that the plain form is tested there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.model_runner.kernels.cpu.build import build
from engine.model_runner.kernels.cpu.compiler import ISAS, Isa, NoLibraryError, find_compilers, runnable_isas
from engine.model_runner.kernels.cpu.library import load_library, open_library
from engine.model_runner.memory.huge_pages import WeightMemory

from .guest import BUILD_LIMIT_S, CPUS, library_of_guest

SANITIZE = ("-fsanitize=address", "-fno-omit-frame-pointer", "-O1")
_USABLE = runnable_isas()
# The first test of a level compiles it, maybe behind another worker that compiles another one.
COMPILES = (pytest.mark.slow, pytest.mark.timeout(600))
COMPILES_FOR_GUEST = (pytest.mark.slow, pytest.mark.timeout(2 * BUILD_LIMIT_S))
EMULATED = "emulated amx"
# Of the levels without AMX that with most in common.
WITHOUT_AMX: Isa = "avx512_bf16" if "avx512_bf16" in _USABLE else next(isa for isa in _USABLE if isa != "amx")


class UsedMemory(WeightMemory):
    """What is not written is not zero."""

    def take(self, num_bytes: int) -> Tensor:
        return super().take(num_bytes).fill_(255)


def library_of(isa: Isa, *options: str) -> ctypes.CDLL:
    if isa in CPUS and isa not in _USABLE and "ENGINE_TEST_SANITIZE" not in os.environ:
        return library_of_guest(isa)
    if isa not in _USABLE:
        pytest.skip(f"{isa} cannot run here")
    try:
        if folder := os.environ.get("ENGINE_TEST_SANITIZE"):
            # This process has the sanitizer; the compiler would take several times as long in it.
            os.environ.pop("LD_PRELOAD", None)
            return open_library(build(isa, Path(folder), options=(*SANITIZE, *options)))
        return open_library(build(isa, options=options)) if options else load_library(isa)
    except NoLibraryError as error:
        pytest.skip(str(error))


def _levels() -> Iterator[Any]:
    in_every_run = {_USABLE[0], EMULATED} if "ENGINE_TEST_SANITIZE" in os.environ else {_USABLE[0]}
    for level in (*ISAS, EMULATED):
        slow = COMPILES_FOR_GUEST if level in CPUS else COMPILES
        yield level if level in in_every_run else pytest.param(level, marks=slow)


@pytest.fixture(params=_levels())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Compiled kernels, level by level."""
    if request.param == EMULATED:
        return library_of(WITHOUT_AMX, "-DEMULATE_AMX")
    return library_of(request.param)


@pytest.fixture
def best_library() -> ctypes.CDLL:
    """The kernels that this CPU serves with."""
    return library_of(_USABLE[0])


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only one: a compiler that writes its arguments instead of code, and a line for each call into `calls`."""
    script = tmp_path / "bin" / "g++"
    script.parent.mkdir()
    script.write_text(
        '#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n'
        '[ -e "$(dirname "$0")/broken" ] && { echo "error: no such register"; exit 1; }\n'
        'while [ "$1" != "-o" ]; do shift; done\necho made > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("engine.model_runner.kernels.cpu.compiler.COMPILERS", ("g++",))
    find_compilers.cache_clear()
    yield script
    find_compilers.cache_clear()
