"""`library_of_guest`: the kernels of another architecture, run by qemu on this process's memory.

Tests call it like a library of this CPU: with addresses of tensors (`guest.cpp`). It runs on one thread.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import pytest

from engine.model_runner.kernels.cpu import build as build_module
from engine.model_runner.kernels.cpu.compiler import Isa, NoLibraryError, find_compilers
from engine.model_runner.kernels.cpu.library import _SIGNATURES, CallHook, NativeFunction

COMPILER: Final = "aarch64-linux-gnu-g++"
EMULATOR: Final = "qemu-aarch64"
SYSTEM: Final = "/usr/aarch64-linux-gnu"  # its libraries
CPUS: Final[dict[Isa, str]] = {
    "neon": "cortex-a72",  # these have no more than the kernels are compiled for
    "neon_dot": "neoverse-n1",
    "neon_i8mm": "max",
    "neon_bf16": "max",
}
PAGE: Final = 4096
OPTIONS: Final = (
    "-std=c++20",
    "-O2",
    "-no-pie",
    "-Wl,-Ttext-segment=0x3000000000",  # Python may be where programs usually are
    "-Wl,--no-as-needed",
    "-fopenmp",  # the library's calls of OpenMP are unresolved, as for its own CPU
)
MOST_WORDS: Final = 40
FAR_BYTES: Final = 1 << 34
STARTS: Final = 20
BUILD_LIMIT_S: Final = 1500


class Guest:
    """A process of the emulator that has loaded the library."""

    def __init__(self, isa: Isa, library: Path) -> None:
        """Start it, at addresses far from those of this process."""
        source = Path(__file__).with_name("guest.cpp")
        key = hashlib.sha256(source.read_bytes() + repr(OPTIONS).encode()).hexdigest()[:12]
        program = library.with_name(f"guest-{key}")
        if not program.exists():
            partial = program.with_suffix(f".{os.getpid()}")
            subprocess.run([COMPILER, *OPTIONS, str(source), "-o", str(partial)], check=True)
            partial.replace(program)
        command = [EMULATOR, "-B", "0", "-L", SYSTEM, "-cpu", CPUS[isa], str(program), str(library)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for _ in range(STARTS):
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            self._answer()
            if not _are_near(_mapped(os.getpid()), _mapped(self._process.pid)):
                return
            with self._process:  # its end closes the pipes, too
                self._process.kill()
        pytest.skip(f"{EMULATOR} uses the addresses of this process")

    def call(self, name: str, signature: str, arguments: tuple[Any, ...]) -> int:
        """Call a function of the library."""
        words = [_word(kind, value) for kind, value in zip(signature, arguments, strict=True)]
        words += [bytes(8)] * (MOST_WORDS - len(words))
        self._send(struct.pack("32s64s", name.encode(), signature.encode()) + b"".join(words))
        return self._answer()

    def _answer(self) -> int:
        while True:
            kind, number = struct.unpack("=cq", self._receive(9))
            if kind == b"D":
                return int(number)
            if kind == b"R":
                page = _page(number)
                self._send(b"\1" + page if page else b"\0")
            elif kind == b"W":
                (size,) = struct.unpack("q", self._receive(8))
                ctypes.memmove(number, self._receive(size), size)
            else:
                raise AssertionError(f"the kernel has accessed {number:#x}, which is no memory of the test")

    def _send(self, data: bytes) -> None:
        assert self._process.stdin
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout
        data = self._process.stdout.read(size)
        assert len(data) == size, f"the emulator has ended with {self._process.wait()}"
        return data


class GuestFunction:
    """A function of the library, in the form of ctypes."""

    def __init__(self, guest: Guest, name: str, result: str, signature: str) -> None:
        self.__name__ = name
        self.restype = None if result == "" else ctypes.c_int64
        self._guest, self._result, self._signature = guest, result, signature

    def __call__(self, *arguments: Any) -> int | None:
        number = self._guest.call(self.__name__, self._signature, arguments)
        if self._result == "i":
            return ctypes.c_int(number).value
        return None if self._result == "" else number


class GuestLibrary:
    """The library's functions as attributes."""

    def __init__(self, isa: Isa, path: Path) -> None:
        guest, self.call_hook = Guest(isa, path), CallHook()
        for name, (result, signature) in _SIGNATURES.items():
            function: Any = GuestFunction(guest, name, result, signature)
            setattr(self, name, NativeFunction(function, signature, None, self.call_hook))


@functools.cache
def library_of_guest(isa: Isa) -> ctypes.CDLL:
    """The kernels for an ISA target of ARM; skips the test without a cross compiler or without the emulator."""
    for command, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(command) is None:
            pytest.skip(f"no {command} (Debian: apt install {package})")
    with patch("engine.model_runner.kernels.cpu.compiler.COMPILERS", (COMPILER,)):
        compilers = find_compilers.__wrapped__()
    with (
        patch.object(build_module, "find_compilers", lambda: compilers),
        patch.object(build_module, "_TIME_LIMIT_S", BUILD_LIMIT_S),
    ):
        try:
            return cast(ctypes.CDLL, GuestLibrary(isa, build_module.build(isa)))
        except NoLibraryError as error:
            pytest.skip(str(error))


def _word(kind: str, value: Any) -> bytes:
    """An argument as 8 bytes; kinds as in `library`."""
    if kind == "f":
        return struct.pack("f4x", value)
    if value is None:
        return bytes(8)
    if not isinstance(value, int):
        value = ctypes.cast(value, ctypes.c_void_p).value or 0
    return struct.pack("Q", value & (1 << 64) - 1)


def _page(address: int) -> bytes:
    """A page of this process; empty if there is none."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            return os.pread(memory.fileno(), PAGE, address)
        except (OSError, OverflowError):
            return b""


def _mapped(pid: int) -> list[range]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "[s" not in line and "[v" not in line]
    return [range(int(begin, 16), int(end, 16)) for begin, end in ends]


def _are_near(some: list[range], others: list[range]) -> bool:
    """Whether the emulator may use addresses of this process, or of memory that it will have."""
    return any(
        one.start < other.stop + FAR_BYTES and other.start < one.stop + FAR_BYTES
        for one in some
        for other in others
    )
