"""Resources of every compiled Triton kernel: registers, spills and shared memory per architecture, without a GPU.

A module of this folder takes part if it has a function `variants() -> list[KernelVariant]`: its kernels with the types
and constants that serving launches them with.
`benchmarks/triton_report.py` prints the table; the tests check every variant against the limits of each architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ARCHITECTURES: Final = (80, 90, 100)
"""Compute capabilities without the dot: A100; H100 and H200; B200."""

_KIB: Final = 1 << 10
_MAX_SHARED_BYTES: Final[Mapping[int, int]] = {
    80: 163 * _KIB,
    86: 99 * _KIB,
    87: 163 * _KIB,
    89: 99 * _KIB,
    90: 227 * _KIB,
    100: 227 * _KIB,
    103: 227 * _KIB,
    120: 99 * _KIB,
}
"""Shared memory per block, by compute capability, from the technical specifications in NVIDIA's CUDA programming
guide."""


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


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one variant on one architecture.

    Attributes:
        registers: per thread; 255 is the maximum.
        stack_bytes: per thread, in (slow) local memory: spilled registers.
        shared_bytes: per block.
        max_shared_bytes: the architecture's limit per block.
    """

    variant: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    max_shared_bytes: int
    max_stack_bytes: int

    @property
    def complaints(self) -> list[str]:
        """The limits that are exceeded."""
        found = []
        if self.stack_bytes > self.max_stack_bytes:
            found.append(f"spills {self.stack_bytes} bytes a thread, {self.max_stack_bytes} are accepted")
        if self.shared_bytes > self.max_shared_bytes:
            found.append(
                f"needs {self.shared_bytes} bytes of shared memory, a block has {self.max_shared_bytes}"
            )
        return found


def all_variants() -> list[KernelVariant]:
    """The variants of all modules with kernels."""
    package = importlib.import_module(__package__ or "")
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(name) for name in names if name != __name__]
    return [variant for module in modules if hasattr(module, "variants") for variant in module.variants()]


def check_arch(arch: int) -> None:
    """Reject an architecture without known limits.

    Raises:
        ValueError: lists the known architectures.
    """
    if arch not in _MAX_SHARED_BYTES:
        raise ValueError(
            f"the shared memory of sm_{arch} is not known; known are {', '.join(map(str, _MAX_SHARED_BYTES))}"
        )


def compile_variant(variant: KernelVariant, arch: int) -> Resources:
    """Compile to machine code. Fails if TRITON_INTERPRET is set: kernels are then plain Python functions.

    Raises:
        ValueError: the variant and its kernel have different arguments; see also `check_arch`.
    """
    check_arch(arch)
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = variant.kernel.arg_names
    missing = set(names) ^ (set(variant.signature) | set(variant.constexprs))
    if missing:
        raise ValueError(f"{variant.name}: arguments that only one side knows: {', '.join(sorted(missing))}")
    signature, attrs = {}, {}
    for index, name in enumerate(names):
        kind, _, divisor = variant.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        if kind.startswith("*") or divisor == "16":
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, dict(variant.constexprs), attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        variant=variant.name,
        arch=arch,
        registers=found["REG"],
        stack_bytes=found["STACK"] + found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        max_shared_bytes=_MAX_SHARED_BYTES[arch],
        max_stack_bytes=variant.max_stack_bytes,
    )
