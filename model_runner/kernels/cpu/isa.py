"""`Isa`: the levels of instructions that the kernels are compiled for, and which of them a CPU can run."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

logger = logging.getLogger(__name__)

Isa = Literal["amx", "avx512_bf16", "avx512", "avx2", "portable"]
ISAS: Final[tuple[Isa, ...]] = get_args(Isa)
"""The best first."""

_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16: Final = (*_AVX512, "avx512_bf16", "avx512_vnni", "avx2", "fma")
_AMX: Final = ("amx_tile", "amx_bf16")
_NEEDED_FLAGS: Final[Mapping[Isa, tuple[str, ...]]] = {
    "amx": (*_AVX512_BF16, *_AMX),
    "avx512_bf16": _AVX512_BF16,
    "avx512": (*_AVX512, "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "portable": (),
}
"""As /proc/cpuinfo names them."""


_SYS_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XTILEDATA: Final = 18


@functools.cache
def best_isa() -> Isa:
    """The best level that this process can run."""
    return runnable_isas()[0]


@functools.cache
def runnable_isas() -> tuple[Isa, ...]:
    """The levels that this process can run, the best first; asks the system for AMX if the CPU has it."""
    isas = usable_isas(cpu_flags())
    if isas[0] == "amx" and (reason := reason_against_tiles()):
        logger.warning("cpu_kernels without AMX, which this CPU has: %s", reason)
        isas.remove("amx")
    return tuple(isas)


def usable_isas(flags: frozenset[str]) -> list[Isa]:
    """The levels that a CPU with these flags can run, the best first."""
    return [isa for isa in ISAS if flags.issuperset(_NEEDED_FLAGS[isa])]


def reason_against_tiles() -> str:
    """Ask Linux for AMX's registers, for all threads of this process, now and later; why it refuses, or nothing.

    They make what is saved of a thread four times as large, so a process gets them on request only.
    """
    system = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number) for number in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA))
    if system.syscall(*arguments) == 0:
        return ""
    error = ctypes.get_errno()
    return f"the system refuses its registers (arch_prctl: {os.strerror(error)}); Linux has them since 5.16"


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, as /proc/cpuinfo names it; nothing where that does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def compiler_options(isa: Isa) -> tuple[str, ...]:
    """What lets a compiler use the level's instructions. Those of AMX we write ourselves (`amx.h`)."""
    options = tuple(f"-m{flag.replace('_', '')}" for flag in _NEEDED_FLAGS[isa] if flag not in _AMX)
    return (*options, "-DHAS_AMX") if isa == "amx" else options
