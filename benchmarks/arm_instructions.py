"""Instructions that the ARM kernels execute, counted by an emulator: how much a path saves, not how long it takes.

    python benchmarks/arm_instructions.py

Each row is one call of a matmul with 1,024 inputs and 256 outputs, in thousands of instructions, for each ISA target of
ARM; `neon` is what every 64-bit one has. Needs a cross compiler and qemu (Debian: g++-aarch64-linux-gnu, qemu-user).
Two runs with different numbers of calls are compared, so that starting does not count.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Final
from unittest.mock import patch

from engine.model_runner.kernels.cpu import build as build_module
from engine.model_runner.kernels.cpu.compiler import ISAS, Isa, find_compilers

COMPILER: Final = "aarch64-linux-gnu-g++"
SYSTEM: Final = "/usr/aarch64-linux-gnu"
TARGETS: Final[tuple[Isa, ...]] = tuple(isa for isa in reversed(ISAS) if isa.startswith("neon"))
BUILD_LIMIT_S: Final = 1500
CALLS: Final = (1, 3)
FORMS: Final = {"bf16": (16, 0), "8 bits": (8, 0), "4 bits": (4, 0), "Q4_K": (4, 1), "Q6_K": (6, 1)}
"""Bits, and whether they are a K-quant's."""
TOKENS: Final = (1, 64)

# The plugin interface of qemu 7.2; its header is in no package.
PLUGIN: Final = """
#include <stdint.h>
#include <stdio.h>
#include <stddef.h>
typedef uint64_t Id;
struct Block;
extern void qemu_plugin_register_vcpu_tb_trans_cb(Id, void (*)(Id, struct Block*));
extern size_t qemu_plugin_tb_n_insns(const struct Block*);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct Block*, int, void*, uint64_t);
extern void qemu_plugin_register_atexit_cb(Id, void (*)(Id, void*), void*);
int qemu_plugin_version = 1;
static uint64_t count;
static void translated(Id id, struct Block* block) {
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &count, qemu_plugin_tb_n_insns(block));
}
static void at_exit(Id id, void* data) { fprintf(stderr, "%llu\\n", (unsigned long long)count); }
int qemu_plugin_install(Id id, const void* info, int argc, char** argv) {
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, at_exit, NULL);
    return 0;
}
"""

CALLER: Final = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
extern "C" void blocks(const void*, int64_t, const uint8_t*, const void*, void*, void*, int64_t, int64_t, int64_t, int,
                       int, int, float, int, int, int64_t, const uint8_t*, int, int64_t);
extern "C" int64_t blocks_workspace_bytes(int64_t, int64_t, int64_t);
extern "C" void linear_to(const void*, int64_t, const void*, const void*, void*, int64_t, int64_t, int64_t, int);
constexpr int64_t INPUTS = 1024, OUTPUTS = 256, NO_TILES = 1 << 30;
int main(int, char** arguments) {
    int calls = atoi(arguments[1]), tokens = atoi(arguments[2]);
    int bits = atoi(arguments[3]), is_super = atoi(arguments[4]);
    auto* weight = static_cast<uint8_t*>(aligned_alloc(64, INPUTS * OUTPUTS * 4));
    for (int64_t n = 0; n < INPUTS * OUTPUTS * 4; ++n) weight[n] = 32 + n % 31;
    auto* x = static_cast<uint16_t*>(aligned_alloc(64, tokens * INPUTS * 2));
    for (int64_t n = 0; n < tokens * INPUTS; ++n) x[n] = 0x3f80 + n % 77;
    void* out = aligned_alloc(64, tokens * OUTPUTS * 4);
    void* workspace = aligned_alloc(64, (blocks_workspace_bytes(tokens, INPUTS, NO_TILES) + 127) / 64 * 64);
    bool has_minima = is_super && bits < 6;
    for (int n = 0; n < calls; ++n)
        if (bits == 16) linear_to(x, INPUTS, weight, nullptr, out, tokens, INPUTS, OUTPUTS, 0);
        else blocks(x, INPUTS, weight, nullptr, out, workspace, tokens, INPUTS, OUTPUTS, bits, has_minima,
                    has_minima ? 0 : 1 << (bits - 1), 1.0f, 0, 0, NO_TILES, nullptr, is_super, 0);
}
"""


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(
        description="instructions of the ARM kernels, counted by an emulator"
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plugin = compiled("gcc", PLUGIN, Path(folder) / "plugin.c", "-shared", "-fPIC")
        callers = {isa: caller(isa, Path(folder)) for isa in TARGETS}
        print("| weight | tokens |", " | ".join(TARGETS), "|")
        print("|---" * (len(TARGETS) + 2) + "|")
        for form, (bits, is_super) in FORMS.items():
            for tokens in TOKENS:
                cells = [
                    f"{instructions(callers[isa], plugin, tokens, bits, is_super) / 1000:,.0f}"
                    for isa in TARGETS
                ]
                print(f"| {form} | {tokens} |", " | ".join(cells), "|", flush=True)


def caller(isa: Isa, folder: Path) -> Path:
    """A program that calls the library of an ISA target."""
    with patch("engine.model_runner.kernels.cpu.compiler.COMPILERS", (COMPILER,)):
        compilers = find_compilers.__wrapped__()
    with (
        patch.object(build_module, "find_compilers", lambda: compilers),
        patch.object(build_module, "_TIME_LIMIT_S", BUILD_LIMIT_S),
    ):
        library = build_module.build(isa)
    return compiled(
        COMPILER,
        CALLER,
        folder / f"{isa}.cpp",
        "-fopenmp",
        "-Wl,--no-as-needed",
        str(library),
        f"-Wl,-rpath,{library.parent}",
    )


def compiled(compiler: str, text: str, source: Path, *options: str) -> Path:
    """The program or library of a source text."""
    source.write_text(text)
    program = source.with_suffix(".out")
    subprocess.run([compiler, "-O2", str(source), "-o", str(program), *options], check=True)
    return program


def instructions(program: Path, plugin: Path, tokens: int, bits: int, is_super: int) -> float:
    """Instructions of one call."""

    def count(calls: int) -> int:
        command = [
            "qemu-aarch64",
            "-L",
            SYSTEM,
            "-E",
            "OMP_NUM_THREADS=1",
            "-plugin",
            str(plugin),
            str(program),
        ]
        arguments = [str(number) for number in (calls, tokens, bits, is_super)]
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
        return int(done.stderr)

    few, many = CALLS
    return (count(many) - count(few)) / (many - few)


if __name__ == "__main__":
    main()
