"""The compile report of every Triton kernel; it needs no GPU.

    python benchmarks/triton_report.py [--arch 80,90,100] [--only NAME] [--seen] [--json FILE]

Kernels declare variants (how to: `model_runner/kernels/triton/kernel_variant.py`); servers of real models launched
others on the mirror of a GPU (`benchmarks/gpu/variants.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

# With it kernels would be plain Python functions. A process that only imports this script keeps it.
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.variants import Variant, build, read_variants
from engine.model_runner.kernels.triton.kernel_variant import KernelVariant, all_variants

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

_ACCEPTED_STACK_BYTES: Final = {"attention_prefill._extend_kernel": 64, "experts._product_kernel": 8}
"""Accepted stack a thread of variants that were seen; of declared ones it is in their declaration."""


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if something is over a limit or does not compile, or there is nothing to compile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", type=_architectures, default=ARCHITECTURES, help="such as 90 or 80,90,100")
    parser.add_argument(
        "--only", action="append", default=[], help="variants with this prefix of the name; may be repeated"
    )
    parser.add_argument("--seen", action="store_true", help="only those that were seen on the mirror")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    variants: list[KernelVariant | Variant] = [*([] if options.seen else all_variants()), *read_variants()]
    rows, failed = [], 0
    for name in options.only:
        if not any(variant.name.startswith(name) for variant in variants):
            failed += 1
            print(f"no variant's name begins with {name!r}", file=sys.stderr)
    for variant in variants:
        if options.only and not variant.name.startswith(tuple(options.only)):
            continue
        for arch in options.arch:
            if not is_launched(variant, arch):
                continue
            try:
                row = compile_variant(variant, arch)
            except Exception as err:  # a compiler may raise anything: continue with the other kernels
                failed += 1
                print(f"sm_{arch:<4} {variant.name:<48} does not compile: {err}")
                continue
            rows.append(row)
            failed += bool(row.complaints)
            print(
                f"sm_{arch:<4} {variant.name:<48} registers={row.registers:<4} stack_bytes={row.stack_bytes:<5} "
                f"shared_bytes={row.shared_bytes:<7} {'; '.join(row.complaints)}".rstrip()
            )
    if not rows and not failed:
        failed += 1
        print("no variant exists for these architectures", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(failed > 0)


def check_arch(arch: int) -> None:
    """Reject an architecture without known limits.

    Raises:
        ValueError: lists the known architectures.
    """
    if arch not in _MAX_SHARED_BYTES:
        raise ValueError(
            f"the shared memory of sm_{arch} is not known; known are {', '.join(map(str, _MAX_SHARED_BYTES))}"
        )


def is_launched(variant: KernelVariant | Variant, arch: int) -> bool:
    """Whether a GPU of an architecture launches it."""
    return arch >= variant.min_arch if isinstance(variant, KernelVariant) else arch in variant.architectures


def compile_variant(variant: KernelVariant | Variant, arch: int) -> Resources:
    """Compile to machine code. Fails if TRITON_INTERPRET is set: kernels are then plain Python functions.

    Raises:
        ValueError: the variant and its kernel have different arguments; see also `check_arch`.
    """
    check_arch(arch)
    if isinstance(variant, Variant):
        key = f"{variant.module.rpartition('.')[2]}.{variant.function}"
        return _resources(
            variant.name, build(variant, arch).compile(), arch, _ACCEPTED_STACK_BYTES.get(key, 0)
        )
    return _resources(variant.name, _compile_declared(variant, arch), arch, variant.max_stack_bytes)


def _compile_declared(variant: KernelVariant, arch: int) -> Any:
    """Triton's `CompiledKernel`."""
    import triton
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
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _resources(name: str, compiled: Any, arch: int, max_stack_bytes: int) -> Resources:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        variant=name,
        arch=arch,
        registers=found["REG"],
        stack_bytes=found["STACK"] + found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        max_shared_bytes=_MAX_SHARED_BYTES[arch],
        max_stack_bytes=max_stack_bytes,
    )


def _architectures(text: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 80,90,100") from error
    for arch in found:
        try:
            check_arch(arch)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return found


if __name__ == "__main__":
    sys.exit(main())
