"""`Isa`: the ISA targets that the kernels are compiled for, and which of them a CPU can run."""

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
    "portable": (),
}
"""CPU flags as in /proc/cpuinfo."""

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
    return frozenset(_cpuinfo().get("flags", "").split())


def _cpuinfo() -> dict[str, str]:
    """The entry of the first CPU in /proc/cpuinfo, if it is an x86 CPU."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def compiler_options(isa: Isa) -> tuple[str, ...]:
    """Compiler options for the ISA target. AMX needs none: its instructions are inline assembly (`amx.h`)."""
    options = tuple(f"-m{flag.replace('_', '')}" for flag in _NEEDED_FLAGS[isa] if flag not in _AMX)
    return (*options, "-DHAS_AMX") if isa == "amx" else options
