"""`KernelVariant`: a Triton kernel as serving launches it, to be compiled ahead of time without a GPU.

A module of this folder takes part if it has a function `variants() -> list[KernelVariant]`: its kernels with the types
and constants that serving launches them with. It needs none where servers of real models launch all forms of its
kernels: those are recorded (`tests/mirror/harvest.py`). `benchmarks/triton_report.py` prints the registers, spills and
shared memory of all variants; the tests check them against the limits of each architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One kernel as serving launches it.

    Attributes:
        name: name in the report: "rms_norm bf16 4096".
        kernel: the function decorated with `triton.jit`.
        signature: type of each argument that is not a constant, in any order: "*bf16", "i64", "fp32". Pointers count as
            aligned to 16 bytes, as torch allocates them; an integer that is always a multiple of 16 is "i32:16".
        constexprs: value of each `tl.constexpr` argument, and None or 1 for arguments that are specialized to it.
        max_stack_bytes: accepted stack per thread: spilled registers and local arrays.
        min_arch: the first compute capability, without the dot, that it can be compiled for and is launched on.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    max_stack_bytes: int = 0
    min_arch: int = 0


def all_variants() -> list[KernelVariant]:
    """The variants of all modules with kernels."""
    package = importlib.import_module(__package__ or "")
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(name) for name in names if name != __name__]
    return [variant for module in modules if hasattr(module, "variants") for variant in module.variants()]
