"""Every Triton kernel compiles for every architecture that we name, without spills, within its shared memory.

In another process: here kernels may be made for Triton's interpreter, which cannot be undone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import triton_report
from benchmarks.gpu.variants import read_variants
from benchmarks.triton_report import ARCHITECTURES, Resources, compile_variant
from engine.model_runner.kernels import triton as kernels
from engine.model_runner.kernels.triton.kernel_variant import KernelVariant, all_variants

REPORT = Path(triton_report.__file__)


def report(tmp_path: Path, *flags: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, what was printed, and the rows of the table."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(REPORT), "--json", str(tmp_path / "report.json"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=env, check=False)
    if not (tmp_path / "report.json").exists():
        raise AssertionError(done.stderr)
    return done.returncode, done.stdout, json.loads((tmp_path / "report.json").read_text())


def test_the_kernels_of_a_decode_step_compile_for_hopper(tmp_path):
    names = ["add_rms_norm bf16, weight bf16, size 4096", "rotate_and_store Qwen3-8B, 2 heads"]
    code, text, rows = report(
        tmp_path, "--arch", "90", *(flag for name in names for flag in ("--only", name))
    )
    assert (code, [row["variant"] for row in rows]) == (0, names), text
    assert all(0 < row["registers"] <= 64 and row["stack_bytes"] == 0 for row in rows)


@pytest.mark.slow
def test_a_name_that_no_kernel_has_fails(tmp_path):
    code, _, rows = report(tmp_path, "--only", "no such kernel")
    assert (code, rows) == (1, [])


@pytest.mark.parametrize("arch", ["91", "hopper"])
def test_an_architecture_that_nobody_knows_is_refused(tmp_path, arch):
    with pytest.raises(AssertionError, match=f"--arch: .*{arch}.* is not "):
        report(tmp_path, "--arch", arch)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_kernels_compile_for_all_architectures(tmp_path):
    code, text, rows = report(tmp_path)
    assert code == 0, text
    compiled = [(v.name, arch) for v in all_variants() for arch in ARCHITECTURES if arch >= v.min_arch]
    seen = [(v.name, arch) for v in read_variants() for arch in v.architectures]
    assert len(rows) == len(compiled) + len(seen)
    assert all(row["shared_bytes"] <= row["max_shared_bytes"] for row in rows)


def test_variants_can_be_told_apart():
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names))


def test_every_kernel_has_variants():
    """A function whose name ends in `_kernel` is launched by the host; those that kernels call end otherwise."""
    defined = {
        (path.stem, name)
        for path in Path(kernels.__file__).parent.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    functions = [variant.kernel.fn for variant in all_variants()]
    seen = {(variant.module.rpartition(".")[2], variant.function) for variant in read_variants()}
    assert seen | {(one.__module__.rpartition(".")[2], one.__name__) for one in functions} == defined
    assert len(defined) > 20


def test_variants_name_the_arguments_of_their_kernels():
    """Also where kernels cannot be compiled; a variant that shares its signature with another changes it, too."""
    wrong = [
        variant.name
        for variant in all_variants()
        if set(variant.kernel.arg_names) != set(variant.signature) | set(variant.constexprs)
    ]
    assert wrong == []


def test_what_is_over_a_limit_is_said():
    row = Resources("x", 90, 255, 16, 300_000, 232_448, 8)
    assert row.complaints == [
        "spills 16 bytes a thread, 8 are accepted",
        "needs 300000 bytes of shared memory, a block has 232448",
    ]
    assert Resources("x", 90, 255, 8, 1000, 232_448, 8).complaints == []


def test_a_variant_that_forgets_an_argument_is_refused():
    variant = next(iter(all_variants()))
    signature = dict(list(variant.signature.items())[1:])
    forgetful = KernelVariant("forgetful", variant.kernel, signature, variant.constexprs)
    with pytest.raises(ValueError, match="arguments that only one side knows"):
        compile_variant(forgetful, 90)
