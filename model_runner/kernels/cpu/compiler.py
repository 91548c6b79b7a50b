"""The ISA targets of the kernels, which of them a CPU can run, and the C++ compilers that make them."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from ....launch.resolve.host_facts import COMPILERS

logger = logging.getLogger(__name__)

Isa = Literal[
    "amx",
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx2_vnni",
    "avx2",
    "neon_bf16",
    "neon_i8mm",
    "neon_dot",
    "neon",
    "portable",
]
ISAS: Final[tuple[Isa, ...]] = get_args(Isa)
"""The best first, for CPUs with fast bfloat16 dot products (`has_slow_bf16`)."""

_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma")
_AVX512_VNNI: Final = (*_AVX512, "avx512_vnni")
_AVX512_BF16: Final = (*_AVX512_VNNI, "avx512_bf16")
_AMX: Final = ("amx_tile", "amx_bf16")
_NEEDED_FLAGS: Final[Mapping[Isa, tuple[str, ...]]] = {
    "amx": (*_AVX512_BF16, *_AMX),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2_vnni": ("avx2", "fma", "avx_vnni"),
    "avx2": ("avx2", "fma"),
    "neon_bf16": ("asimddp", "i8mm", "bf16"),
    "neon_i8mm": ("asimddp", "i8mm"),
    "neon_dot": ("asimddp",),
    "neon": ("asimd",),
    "portable": (),
}
"""CPU flags as in /proc/cpuinfo, where ARM's are called features."""

_ARM_OPTIONS: Final[Mapping[str, str]] = {
    "neon_bf16": "-march=armv8.2-a+dotprod+i8mm+bf16",
    "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm",
    "neon_dot": "-march=armv8.2-a+dotprod",
    "neon": "-march=armv8-a",
}

_COOPER_LAKE: Final = (
    "85"  # CPU model with bfloat16 dot products as fast as FMA, like all AMD CPUs that have them
)

_SYS_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XTILEDATA: Final = 18


@functools.cache
def best_isa() -> Isa:
    """The best ISA target that this process can run."""
    return runnable_isas()[0]


@functools.cache
def runnable_isas() -> tuple[Isa, ...]:
    """The ISA targets that this process can run, best first; requests AMX from the system if the CPU has it."""
    isas = usable_isas(cpu_flags(), slow_bf16=has_slow_bf16())
    if isas[0] == "amx" and (reason := reason_against_tiles()):
        logger.warning("cpu_kernels without AMX, which this CPU has: %s", reason)
        isas.remove("amx")
    return tuple(isas)


def usable_isas(flags: frozenset[str], *, slow_bf16: bool = False) -> list[Isa]:
    """The ISA targets that a CPU with these flags can run, best first.

    Args:
        slow_bf16: see `has_slow_bf16`; AVX-512 with plain FMA then comes first.
    """
    usable = [isa for isa in ISAS if flags.issuperset(_NEEDED_FLAGS[isa])]
    if slow_bf16 and "avx512_bf16" in usable:
        usable.remove("avx512_bf16")
        usable.insert(usable.index("avx512_vnni") + 1, "avx512_bf16")
    return usable


def has_slow_bf16() -> bool:
    """Whether AVX-512's bfloat16 dot product has a lower throughput than FMA in float32.

    True on Intel CPUs with AMX units (which a hypervisor may hide): one dot product in two cycles against two FMAs per
    cycle is half the throughput. Decided by the CPU model, not by a measurement: bits depend on it.
    """
    facts = _cpuinfo()
    return facts.get("vendor_id") == "GenuineIntel" and facts.get("model") != _COOPER_LAKE


def reason_against_tiles() -> str:
    """Request AMX registers from Linux for all threads of this process, now and later; why it refuses, or "".

    They make the saved state of a thread four times as large, so a process gets them only on request.
    """
    system = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number) for number in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA))
    if system.syscall(*arguments) == 0:
        return ""
    error = ctypes.get_errno()
    return f"the system refuses its registers (arch_prctl: {os.strerror(error)}); Linux has them since 5.16"


def cpu_flags() -> frozenset[str]:
    """The flags of this CPU in /proc/cpuinfo; empty if that does not exist."""
    facts = _cpuinfo()
    return frozenset(facts.get("flags", facts.get("Features", "")).split())  # x86, ARM


def _cpuinfo() -> dict[str, str]:
    """The entry of the first CPU in /proc/cpuinfo, if it is an x86 or a 64-bit ARM CPU."""
    if platform.machine() not in ("x86_64", "AMD64", "aarch64"):
        return {}
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def compiler_options(isa: Isa) -> tuple[str, ...]:
    """Compiler options for the ISA target. AMX needs none: its instructions are inline assembly (`amx.h`)."""
    if isa in _ARM_OPTIONS:
        return (_ARM_OPTIONS[isa],)
    options = tuple(f"-m{flag.replace('_', '')}" for flag in _NEEDED_FLAGS[isa] if flag not in _AMX)
    return (*options, "-DHAS_AMX") if isa == "amx" else options


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
