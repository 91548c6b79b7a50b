"""`Compiler`: finds the C++ compilers, checks that their OpenMP code works with torch's threads, and runs them."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ....launch.resolve.host_facts import COMPILERS

_GCC_PARALLEL: Final = "GOMP_parallel"
_CLANG_PARALLEL: Final = "__kmpc_fork_call"
_QUOTED_CHARS: Final = 1000  # of the output of a failing compiler


class NoLibraryError(Exception):
    """The library cannot be built or loaded; the message says why."""


class Compiler(NamedTuple):
    """A compiler and the key under which its result is stored.

    Attributes:
        identity: changes when the compiler does.
        openmp: torch's OpenMP runtime has the functions that its code calls; if not, kernels run on one thread.
    """

    path: str
    identity: str
    openmp: bool


@functools.cache
def find_compilers() -> tuple[Compiler, ...]:
    """The compilers on the path, in the order in which they are tried."""
    found: dict[Path, Compiler] = {}
    for name in COMPILERS:
        command = shutil.which(name)
        if command is None:
            continue
        path = Path(command).resolve()
        status = path.stat()  # asking the compiler for its version would cost a process at every start
        wanted = _CLANG_PARALLEL if "clang" in path.name else _GCC_PARALLEL
        identity = f"{path} {status.st_size} {status.st_mtime_ns}"
        found.setdefault(path, Compiler(command, identity, wanted in torch_openmp()))
    return tuple(found.values())


@functools.cache
def torch_openmp() -> frozenset[str]:
    """The compilers' OpenMP entry points that torch's runtime has; makes them visible to libraries loaded later."""
    return frozenset(symbol for symbol in (_GCC_PARALLEL, _CLANG_PARALLEL) if _expose(symbol))


def _expose(symbol: str) -> bool:
    import torch  # not for `build.is_built`, which a start calls before torch is needed

    if hasattr(ctypes.CDLL(None), symbol):
        return True
    runtimes = sorted(Path(torch.__file__).parent.glob("lib/lib*omp*.so*"))
    return any(hasattr(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL), symbol) for path in runtimes)


def run_all(commands: Sequence[Sequence[str]], folder: Path, deadline_s: float) -> None:
    """Run commands in parallel.

    A compiler is a driver with child processes: all of them are terminated at the deadline, or when this call fails.
    Their output goes to files: a child that outlives its driver would keep a pipe open.

    Args:
        folder: for the output files and the temporary files of the compiler.
        deadline_s: in the time of `time.monotonic`.

    Raises:
        NoLibraryError: a command failed or exceeded the deadline.
    """
    running: list[tuple[Sequence[str], Path, subprocess.Popen[bytes]]] = []
    try:
        for number, command in enumerate(commands):
            said = folder / f"{number}.log"
            with said.open("wb") as file:
                running.append((command, said, _start(command, file.fileno(), folder)))
        for command, said, process in running:
            try:
                code = process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise NoLibraryError(f"{command[0]} takes too long for the CPU kernels") from None
            if code:
                quoted = said.read_text(errors="replace").strip()[-_QUOTED_CHARS:]
                raise NoLibraryError(f"{command[0]} cannot compile the CPU kernels: {quoted}")
    finally:
        for _, _, process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(command: Sequence[str], output: int, folder: Path) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A compiler that is killed leaves its temporary files: below this folder they are removed with it.
            env=os.environ | {"TMPDIR": str(folder)},
            start_new_session=True,
        )
    except OSError as error:
        raise NoLibraryError(f"cannot run {command[0]}: {error}") from error
