"""The inner loops of the CPU kernels keep their sums in registers, and the tool that counts it counts right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cpu_loops import Loops, hot_loops, loops_of
from engine.model_runner.kernels.cpu import build
from engine.model_runner.kernels.cpu.compiler import Isa, compiler_options

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "model_runner/kernels/cpu"

# 8 products in the inner loop; the outer one has a further product, a move to the stack and one from it. The loop of
# `g` has too few products.
INNER = """\
    100c:	vmovdqa 0x40(%rsp),%ymm1
    1010:	vpmaddubsw %ymm5,%ymm0,%ymm1
    1014:	vpaddw %ymm1,%ymm7,%ymm7
    1018:	vfmadd213ps 0x20(%rbp),%ymm14,%ymm1
    101c:	vfmadd231ps (%rdx,%rax,8),%ymm14,%ymm1
    1020:	mov    0x40(%rsp),%rbx
    1024:	vmovaps %ymm1,0x120(%rsp,%rax,1)
    1028:	vpdpbusd %zmm1,%zmm2,%zmm3
    102e:	{{vex}} vpdpbusd %ymm1,%ymm2,%ymm3
    1034:	vdpbf16ps %zmm1,%zmm2,%zmm3
    103a:	vpmaddwd %ymm1,%ymm2,%ymm3
    103e:	vfmadd231ps %ymm1,%ymm2,%ymm3
    1042:	jne    100c <f(int)+0xc>
"""
FUNCTION = f"""\
0000000000001000 <f(int)>:
    1000:	{{begin}}
    1004:	vfmadd231ps 0x20(%rsp),%ymm14,%ymm1
{INNER}\
    1046:	vmovaps %ymm1,0x20(%rsp)
    104a:	jne    1004 <f(int)+0x4>
    104e:	ret

0000000000001050 <g>:
    1050:	vmovaps %ymm1,0x20(%rsp)
    1054:	vfmadd231ps 0x20(%rsp),%ymm14,%ymm1
    1058:	jmp    1050 <g>
"""


@pytest.mark.parametrize(("begin", "moves"), [("xor    %eax,%eax", 2), ("mov    %rsp,%rbp", 3)])
def test_moves_to_the_stack_are_counted_in_innermost_loops(begin: str, moves: int) -> None:
    """The frame's register is the stack only where it was set to it."""
    assert list(loops_of(FUNCTION.format(begin=begin).splitlines())) == [Loops("f(int)", 8, moves)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize(
    ("source", "isa", "bound"),
    [
        ("blocks.cpp", "avx2", 0.45),  # measured: GCC 12.2 0.30, Clang 14 0.26; before sums were pinned 2.0
        ("blocks.cpp", "avx512", 0.2),  # 0.06, 0.02; before 1.3
        ("super_matmul.cpp", "avx2", 0.5),  # 0.25, 0.40; before 1.3
        ("attention.cpp", "avx2", 0.35),  # 0.23, 0.12; before 1.3, 1.7
        ("attention.cpp", "avx512", 0.3),  # 0.16, 0.21; before 0.20, 0.16
    ],
)
def test_sums_stay_in_registers(tmp_path: Path, compiler: str, source: str, isa: Isa, bound: float) -> None:
    if shutil.which("objdump") is None or shutil.which(compiler) is None:
        pytest.skip(f"no objdump or no {compiler}")
    out = tmp_path / "loops.o"
    command = [compiler, *build._OPTIONS, *compiler_options(isa), "-c", str(SOURCES / source), "-o", str(out)]
    if compiler == "g++":
        command.append("-fopenmp")
    subprocess.run(command, check=True)
    found = hot_loops(out)
    assert sum(loops.multiplications for loops in found) > 1000
    assert sum(loops.moves for loops in found) <= bound * sum(loops.multiplications for loops in found)


@pytest.mark.slow
def test_ceilings_without_bfloat16_products() -> None:
    """oneDNN refuses bfloat16 weights without AVX-512; the other figures are measured all the same."""
    code = (
        "import torch; from benchmarks.ceilings import product_rate\n"
        "assert product_rate(4, torch.bfloat16, 64, 64) == 0.0 < product_rate(4, torch.float32, 64, 64)"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, cwd=ROOT, check=True
    )
