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

Isa = Literal["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable"]
ISAS: Final[tuple[Isa, ...]] = get_args(Isa)
"""The best first, where bfloat16 dot products are fast (`has_slow_bf16`)."""

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
    "portable": (),
}
"""As /proc/cpuinfo names them."""

_COOPER_LAKE: Final = "85"  # its dot products are as fast as FMA; so are those of all AMD CPUs that have them

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
    isas = usable_isas(cpu_flags(), slow_bf16=has_slow_bf16())
    if isas[0] == "amx" and (reason := reason_against_tiles()):
        logger.warning("cpu_kernels without AMX, which this CPU has: %s", reason)
        isas.remove("amx")
    return tuple(isas)


def usable_isas(flags: frozenset[str], *, slow_bf16: bool = False) -> list[Isa]:
    """The levels that a CPU with these flags can run, the best first.

    Args:
        slow_bf16: see `has_slow_bf16`; AVX-512's plain FMA comes first then.
    """
    usable = [isa for isa in ISAS if flags.issuperset(_NEEDED_FLAGS[isa])]
    if slow_bf16 and "avx512_bf16" in usable:
        usable.remove("avx512_bf16")
        usable.insert(usable.index("avx512_vnni") + 1, "avx512_bf16")
    return usable


def has_slow_bf16() -> bool:
    """Whether AVX-512's bfloat16 dot product multiplies fewer numbers in a second than FMA does in float32.

    So it is on Intel's CPUs with AMX's units, which a hypervisor may hide: one such product in two cycles against two
    FMAs a cycle, half as many numbers. Told by the CPU's name and not by a measurement: bits depend on it.
    """
    facts = _cpuinfo()
    return facts.get("vendor_id") == "GenuineIntel" and facts.get("model") != _COOPER_LAKE


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
    return frozenset(_cpuinfo().get("flags", "").split())


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first CPU, if it is of the x86 family."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def compiler_options(isa: Isa) -> tuple[str, ...]:
    """What lets a compiler use the level's instructions. Those of AMX we write ourselves (`amx.h`)."""
    options = tuple(f"-m{flag.replace('_', '')}" for flag in _NEEDED_FLAGS[isa] if flag not in _AMX)
    return (*options, "-DHAS_AMX") if isa == "amx" else options
