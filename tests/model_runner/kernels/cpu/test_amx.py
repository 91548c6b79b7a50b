"""Tiles (`amx.h`): what stands for AMX where there is none gives the bits of the instructions."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.model_runner.kernels import cpu
from engine.model_runner.kernels.cpu.compiler import Isa, compiler_options, find_compilers, runnable_isas


def products(folder: Path, name: str, options: tuple[str, ...]) -> list[str]:
    if not (compilers := find_compilers()):
        pytest.skip("no C++ compiler")
    program = folder / name
    command = [compilers[0].path, "-std=c++20", "-O3", *options, f"-I{Path(cpu.__file__).parent}"]
    subprocess.run(
        [*command, str(Path(__file__).with_name("amx_products.cpp")), "-o", str(program)], check=True
    )
    return subprocess.run(
        [str(program)], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()


@pytest.mark.parametrize("isa", ["avx2", "avx512_bf16"])
def test_the_plain_form_has_the_bits_of_the_instructions(tmp_path, isa: Isa):
    if runnable_isas()[0] != "amx":
        pytest.skip("AMX cannot run here")
    plain = products(tmp_path, "plain", (*compiler_options(isa), "-DEMULATE_AMX"))
    tiles = products(tmp_path, "tiles", compiler_options("amx"))
    assert len(plain) == 400 * 16 * 17
    assert plain == tiles


@pytest.mark.slow
def test_the_plain_form_is_the_same_at_every_level(tmp_path):
    outs = [
        products(tmp_path, isa, (*compiler_options(isa), "-DEMULATE_AMX"))
        for isa in runnable_isas()
        if isa in ("avx512_bf16", "avx2")
    ]
    assert all(out == outs[0] for out in outs)
