"""The inner loops of the compiled CPU kernels: do sums stay in registers, and how near are they to the peak?

    python benchmarks/cpu_loops.py                                 # this CPU's best build
    python benchmarks/cpu_loops.py --isa avx2 avx512_vnni          # other builds, also those that this CPU cannot run
    python benchmarks/cpu_loops.py --isa avx2 --compiler clang++   # another compiler
    python benchmarks/cpu_loops.py --isa avx2 --peak               # rates of the matmuls beside their peaks

Each build is compiled, unless it is in the cache folder, and disassembled with objdump. A function's hot loops are its
innermost ones that have vector multiplications. For each function the table shows how many multiplications they have,
how many vector instructions with an operand on the stack, and the quotient of the two. A compiler that runs out of
registers moves accumulators to the stack and back, which takes as long as multiplying.

`--peak` runs on one core. The peak is that of the multiplication and the addition that the matmul cannot do without, on
registers alone, in a loop that is compiled on the spot. Each figure is the best of many short runs, in CPU
time.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

from engine.model_runner.kernels.cpu import build as build_module
from engine.model_runner.kernels.cpu.compiler import (
    ISAS,
    Isa,
    best_isa,
    compiler_options,
    find_compilers,
    runnable_isas,
)

MULTIPLICATION: Final = re.compile(r"v(pmaddubsw|pmaddwd|pdpbusd|pdpwssd|dpbf16ps|fn?m(add|sub)\d*ps)")
MIN_MULTIPLICATIONS: Final = 8  # of a hot loop: fewer are not a matmul's
FUNCTION: Final = re.compile(r"^[0-9a-f]+ <(?P<name>.*)>:$")
INSTRUCTION: Final = re.compile(r"^\s*([0-9a-f]+):\s+(?:\{\w+\} )?(\S+)\s*([^<#]*)")
STACK: Final = re.compile(r"\(%rsp[,)]")
STACK_OR_FRAME: Final = re.compile(r"\(%r[sb]p[,)]")


class Instruction(NamedTuple):
    """One line of the disassembly."""

    address: int
    code: str
    operands: str


class Loops(NamedTuple):
    """The hot loops of a function.

    Attributes:
        multiplications: vector multiplications.
        moves: vector instructions that read or write the stack.
    """

    function: str
    multiplications: int
    moves: int


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="inner loops of the CPU kernels")
    parser.add_argument("--isa", nargs="+", choices=ISAS[:-1], default=[best_isa()])
    parser.add_argument("--compiler", help="name or path; the first one found by default")
    parser.add_argument("--peak", action="store_true", help="measure rates instead")
    args = parser.parse_args()
    for isa in args.isa:
        print(f"\n{isa}")
        if args.peak:
            show_rates(isa, args.compiler)
        else:
            show_loops(hot_loops(compiled(isa, args.compiler)))


def compiled(isa: Isa, compiler: str | None) -> Path:
    """The library of an ISA target, by the compiler with this name."""
    if compiler is None:
        return build_module.build(isa)
    with patch("engine.model_runner.kernels.cpu.compiler.COMPILERS", (compiler,)):
        chosen = find_compilers.__wrapped__()
    with patch.object(build_module, "find_compilers", lambda: chosen):
        return build_module.build(isa)


# ---------------------------------------------------------------- loops


def show_loops(all_loops: list[Loops]) -> None:
    """The table of a build, the worst function first."""
    print(f"{'moves':>7} {'products':>8} {'moves/product':>13}  function")
    products, moves = (
        sum(loops.multiplications for loops in all_loops),
        sum(loops.moves for loops in all_loops),
    )
    for loops in [*sorted(all_loops, key=lambda loops: -loops.moves), Loops("all", products, moves)]:
        quotient = loops.moves / max(loops.multiplications, 1)
        print(f"{loops.moves:7} {loops.multiplications:8} {quotient:13.2f}  {short(loops.function)}")


def short(function: str) -> str:
    """A C++ name without namespaces and arguments."""
    name = re.sub(r"\(anonymous namespace\)::|engine::|\[clone [^]]*\]|\(engine[^)]*\)", "", function)
    name = re.sub(
        r"\((?:(?:long|int|unsigned|float|void|const|char|\*|&|\w+ const[&*]|,| )+)\)( const)?", "", name
    )
    return re.sub(r"^(?:auto|void) ", "", name).strip()[:150]


def hot_loops(library: Path) -> list[Loops]:
    """The hot loops of each function of a library or an object file that has any."""
    text = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return list(loops_of(text.splitlines()))


def loops_of(lines: Iterable[str]) -> Iterator[Loops]:
    """The same of objdump's text."""
    name, instructions = "", list[Instruction]()
    for line in [*lines, "0 <>:"]:
        if match := FUNCTION.match(line):
            if (loops := loops_of_function(name, instructions)).multiplications:
                yield loops
            name, instructions = match["name"], []
        elif match := INSTRUCTION.match(line):
            address, code, operands = match.groups()
            instructions.append(Instruction(int(address, 16), code, operands.strip()))


def loops_of_function(name: str, instructions: list[Instruction]) -> Loops:
    """Sums over the innermost loops with multiplications."""
    index_of = {instruction.address: index for index, instruction in enumerate(instructions)}
    loops = []
    for index, instruction in enumerate(instructions):
        if instruction.code.startswith("j") and re.fullmatch("[0-9a-f]+", instruction.operands):
            begin = index_of.get(int(instruction.operands, 16), index + 1)
            if begin <= index and any(MULTIPLICATION.match(each.code) for each in instructions[begin:index]):
                loops.append(range(begin, index + 1))
    innermost = [
        loop
        for loop in loops
        if not any(other != loop and other[0] >= loop[0] and other[-1] <= loop[-1] for other in loops)
    ]
    # A function that keeps a frame pointer has its variables below it; otherwise the register is any pointer.
    has_frame = any(each.code == "mov" and each.operands == "%rsp,%rbp" for each in instructions)
    stack = STACK_OR_FRAME if has_frame else STACK
    multiplications = moves = 0
    for loop in innermost:
        body = [instructions[index] for index in loop]
        products = sum(bool(MULTIPLICATION.match(each.code)) for each in body)
        if products >= MIN_MULTIPLICATIONS:
            multiplications += products
            moves += sum(each.code.startswith("v") and bool(stack.search(each.operands)) for each in body)
    return Loops(name, multiplications, moves)


# ---------------------------------------------------------------- rates


class Mix(NamedTuple):
    """The instructions that a matmul cannot do without.

    Attributes:
        step: assembly, with the names of registers: a sum, the operands a and b, a temporary one.
        operations: additions and multiplications of one step on 256 bits.
        bits: of the registers.
    """

    name: str
    step: str
    operations: int
    bits: int


FLOATS: Final = Mix("vfmadd231ps", "vfmadd231ps {b}, {a}, {sum}", 16, 256)
WORDS: Final = Mix("vpmaddubsw, vpaddw", "vpmaddubsw {b}, {a}, {t}; vpaddw {t}, {sum}, {sum}", 64, 256)
BYTES: Final = Mix(
    "vpsignb, vpmaddubsw, vpmaddwd, vpaddd",
    "vpsignb {a}, {b}, {t}; vpmaddubsw {t}, {a}, {t}; vpmaddwd {b}, {t}, {t}; vpaddd {t}, {sum}, {sum}",
    64,
    256,
)
BYTE_DOTS: Final = Mix("vpdpbusd", "{vex}vpdpbusd {b}, {a}, {sum}", 64, 256)
PAIRS: Final = Mix("vdpbf16ps", "vdpbf16ps {b}, {a}, {sum}", 32, 256)

NUM_SUMS: Final = 12  # independent ones: more than multiplications are in flight
PEAK_SOURCE: Final = """
extern "C" void run(long rounds) {
    asm volatile("vzeroall" : : : %(registers)s);
    for (long n = 0; n < rounds; ++n) asm volatile("%(steps)s" : : : %(registers)s);
}
"""


def peak_source(mix: Mix) -> str:
    """The C++ source of a loop of a mix's instructions."""
    kind = "zmm" if mix.bits == 512 else "ymm"
    names = {name: f"%%{kind}{NUM_SUMS + n}" for n, name in enumerate("abt")}
    vex = "%{vex%} " if mix.bits == 256 else ""
    steps = [mix.step.format(sum=f"%%{kind}{n}", vex=vex, **names) for n in range(NUM_SUMS)]
    registers = ", ".join(f'"xmm{n}"' for n in range(NUM_SUMS + 3))
    return PEAK_SOURCE % {"steps": "; ".join(steps), "registers": registers}


TOKENS, INPUTS, OUTPUTS = (
    512,
    2048,
    2048,
)  # of the measured matmuls: a chunk of a prompt, a layer of a 1B model


class Matmul(NamedTuple):
    """A matmul that is measured.

    Attributes:
        bits: of the weight; 16: bfloat16.
        form: of the weight: "" a zero point, "minima", "table", "small table" (`block_table.h`), or "super" (K-quants).
    """

    bits: int
    form: str = ""

    def __str__(self) -> str:
        """The name in the table."""
        return "bfloat16" if self.bits == 16 else f"{self.bits} bits {self.form}".strip()

    def mix(self, isa: Isa) -> Mix:
        """The instructions of its products."""
        wide = isa.startswith("avx512") or isa == "amx"
        if self.bits == 16:
            mix = PAIRS if isa in ("avx512_bf16", "amx") else FLOATS
        elif isa in ("avx2", "avx512"):
            mix = BYTES if self.bits == 8 or self.form == "table" else WORDS
        else:
            mix = BYTE_DOTS
        return mix._replace(bits=512) if wide and mix is not BYTES else mix

    def call(self, library: ctypes.CDLL, tokens: int = TOKENS) -> Callable[[], object]:
        """A call of the kernel on numbers without NaN."""
        import torch

        x = torch.randn(tokens, INPUTS).to(torch.bfloat16)
        out = torch.empty(tokens, OUTPUTS, dtype=torch.bfloat16)
        if self.bits == 16:
            weight = torch.randn(OUTPUTS, INPUTS).to(torch.bfloat16)
            packed = torch.empty(library.packed_linear_bytes(OUTPUTS, INPUTS), dtype=torch.uint8)
            library.pack_linear(weight.data_ptr(), OUTPUTS, INPUTS, packed.data_ptr())
            arguments = (
                x.data_ptr(),
                INPUTS,
                packed.data_ptr(),
                None,
                out.data_ptr(),
                tokens,
                INPUTS,
                OUTPUTS,
                0,
            )
            return lambda: (library.linear_to(*arguments), x, packed, out)
        is_super = self.form == "super"
        has_minima = self.form == "minima" or (is_super and self.bits < 6)
        num_bytes = OUTPUTS * INPUTS * (self.bits + 1)  # more than any form has
        packed = torch.randint(32, 64, (num_bytes // 8,), dtype=torch.uint8)  # as scales: normal numbers
        tables = {"table": torch.arange(120, 136), "small table": torch.arange(16)}
        table = tables[self.form].to(torch.uint8) if self.form in tables else None
        workspace = torch.empty(library.blocks_workspace_bytes(tokens, INPUTS, 1 << 30), dtype=torch.uint8)
        pointers = (x.data_ptr(), INPUTS, packed.data_ptr(), None, out.data_ptr(), workspace.data_ptr())
        sizes = (
            tokens,
            INPUTS,
            OUTPUTS,
            self.bits,
            int(has_minima),
            0 if has_minima else 1 << (self.bits - 1),
            1.0,
        )
        rest = (0, 0, 1 << 30, None if table is None else table.data_ptr(), int(is_super), 0)
        return lambda: (library.blocks(*pointers, *sizes, *rest), x, packed, out, workspace, table)


MATMULS: Final = (
    Matmul(16),
    Matmul(4),
    Matmul(4, "minima"),
    Matmul(4, "table"),
    Matmul(4, "small table"),
    Matmul(8),
    Matmul(8, "minima"),
    *(Matmul(bits, "super") for bits in (4, 5, 6)),
)


def show_rates(isa: Isa, compiler: str | None) -> None:
    """The rates of the matmuls and the peaks of their instructions, on one core."""
    import torch

    from engine.model_runner.kernels.cpu.library import open_library

    if isa not in runnable_isas():
        sys.exit(f"this CPU cannot run {isa}")
    torch.set_num_threads(1)
    library = open_library(compiled(isa, compiler))
    peaks: dict[Mix, float] = {}
    print(
        f"{'Gop/s':>7} {'peak':>7} {'share':>6}  matmul, {TOKENS} tokens, {INPUTS} inputs, {OUTPUTS} outputs"
    )
    for matmul in MATMULS:
        mix = matmul.mix(isa)
        if mix not in peaks:
            peaks[mix] = peak_rate(mix, isa)
        peak = peaks[mix]
        rate = 2 * TOKENS * INPUTS * OUTPUTS / best_s(matmul.call(library)) / 1e9
        print(
            f"{rate:7.0f} {peak:7.0f} {rate / peak:6.0%}  {matmul} ({mix.name}, {mix.bits} bits)", flush=True
        )


def best_s(work: Callable[[], object], limit_s: float = 1.5) -> float:
    """The shortest of the runs within a time limit."""
    shortest, end_s = float("inf"), time.perf_counter() + limit_s
    while time.perf_counter() < end_s:
        started_s = time.thread_time()
        work()
        shortest = min(shortest, time.thread_time() - started_s)
    return shortest


def peak_rate(mix: Mix, isa: Isa) -> float:
    """Gop/s of the mix's instructions in a loop without loads, on this core."""
    rounds = 1_000_000
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "peak.cpp")
        source.write_text(peak_source(mix))
        compiler = find_compilers()[0]
        command = [
            compiler.path,
            "-O3",
            "-fPIC",
            "-shared",
            *compiler_options(isa),
            str(source),
            "-o",
            f"{name}/peak.so",
        ]
        subprocess.run(command, check=True)
        run = ctypes.CDLL(f"{name}/peak.so").run
    run.argtypes = [ctypes.c_long]
    return NUM_SUMS * rounds * mix.operations * mix.bits / 256 / best_s(lambda: run(rounds)) / 1e9


if __name__ == "__main__":
    main()
