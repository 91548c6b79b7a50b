"""Variants seen on the mirror of a GPU, compiled ahead of time and put into Triton's cache of another machine."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.variants import read_variants, write_variants

IN_ANOTHER_PROCESS = """
import json, sys
from pathlib import Path
from benchmarks.gpu import variants
from types import SimpleNamespace
import triton
from triton import knobs
from triton.runtime import cache, driver

folder, told = Path(sys.argv[1]), []
archive = folder / "kernels.tar.xz"
variant = next(each for each in variants.read_variants() if each.function == "_rms_norm_kernel")
seen = lambda **facts: told.append(facts["cache_hit"])
knobs.compilation.listener = seen
assert variants.pack([variant], 90, archive) == 1
first = variants.build(variant, 90)

# The other machine: its Triton has other bytes, and its cache is empty.
original = cache.triton_key
cache.triton_key = lambda: original() + "other"
knobs.cache.dir = str(folder / "cache")
other = variants.build(variant, 90)
assert other.key == first.key and other.cache_hash != first.cache_hash
print(variants.seat(archive))
told.clear()
compiled = other.compile()
assert told == [True], "it was compiled again"

# As a launch looks for it, on a GPU that does not exist.
driver.set_active(SimpleNamespace(
    get_current_target=lambda: first.target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
))
told.clear()
arguments = variants.arguments_of(variant)
launched = other.source.fn.run(grid=None, warmup=True, **arguments, **variant.options)
assert told == [True] and launched.hash == other.cache_hash
assert compiled.asm["cubin"] == first.compile().asm["cubin"] and compiled.metadata.num_warps > 0

files = variants.read_archive(archive)
index = json.loads(files[variants.INDEX])
index["kernels"][0]["key"] += "x"
variants.write_archive(archive, files | {variants.INDEX: json.dumps(index).encode()})
print(variants.seat(archive))
index["triton"] = "3.5.0"
variants.write_archive(archive, files | {variants.INDEX: json.dumps(index).encode()})
print(variants.seat(archive))
"""


def test_kernels_have_the_arguments_of_their_variants():
    """If not: `python -m tests.mirror.harvest`."""
    for variant in read_variants():
        kernel = getattr(importlib.import_module(variant.module), variant.function)
        assert not set(variant.signature) & set(variant.constants)
        assert set(variant.signature) | set(variant.constants) <= set(kernel.arg_names), variant.name


def test_a_list_of_variants_is_read_as_it_was_written(tmp_path):
    variants = read_variants()
    assert len(variants) > 50
    write_variants(reversed(variants), tmp_path / "variants.json")
    assert read_variants(tmp_path / "variants.json") == variants


@pytest.mark.slow
def test_a_compiled_kernel_is_used_only_with_the_same_key(tmp_path: Path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "first")
    root = str(Path(__file__).parents[3])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), root)))
    command = [sys.executable, "-P", "-c", IN_ANOTHER_PROCESS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 of 1 compiled kernels for sm_90 are in Triton's cache",
        "0 of 1 compiled kernels for sm_90 are in Triton's cache; not used: _rms_norm_kernel: another key",
        "compiled kernels are not used: they are of Triton 3.5.0, not 3.6.0",
    ]
