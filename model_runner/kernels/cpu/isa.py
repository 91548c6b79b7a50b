"""`Isa`: the levels of instructions that the kernels are compiled for, and which of them a CPU can run."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

Isa = Literal["avx512_bf16", "avx512", "avx2", "portable"]
ISAS: Final[tuple[Isa, ...]] = get_args(Isa)
"""The best first."""

_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_NEEDED_FLAGS: Final[Mapping[Isa, tuple[str, ...]]] = {
    "avx512_bf16": (*_AVX512, "avx512_bf16", "avx512_vnni", "avx2", "fma"),
    "avx512": (*_AVX512, "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "portable": (),
}
"""As /proc/cpuinfo names them."""


@functools.cache
def best_isa() -> Isa:
    """The best level of this CPU."""
    return usable_isas(cpu_flags())[0]


def usable_isas(flags: frozenset[str]) -> list[Isa]:
    """The levels that a CPU with these flags can run, the best first."""
    return [isa for isa in ISAS if flags.issuperset(_NEEDED_FLAGS[isa])]


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
    """What lets a compiler use the level's instructions."""
    return tuple(f"-m{flag.replace('_', '')}" for flag in _NEEDED_FLAGS[isa])
