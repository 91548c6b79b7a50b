"""The compiled library: which levels a CPU can run, whose threads it has, and why it is passed over."""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model_runner.attention.cpu_native import CpuNativeAttention
from engine.model_runner.kernels.cpu import compiler as isa_module
from engine.model_runner.kernels.cpu import library as module
from engine.model_runner.kernels.cpu.build import build
from engine.model_runner.kernels.cpu.compiler import (
    NoLibraryError,
    cpu_flags,
    find_compilers,
    runnable_isas,
    usable_isas,
)
from engine.model_runner.kernels.cpu.library import open_library
from engine.model_runner.kernels.native import reasons_against_native
from tests.model_runner.attention.paged_batches import spec_of

AVX2 = frozenset({"sse2", "avx2", "fma"})
NEON = frozenset({"fp", "asimd", "evtstrm", "crc32"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AVX512_VNNI = AVX512 | {"avx512_vnni"}
AVX512_BF16 = AVX512_VNNI | {"avx512_bf16"}
AMX = AVX512_BF16 | {"amx_tile", "amx_bf16"}


def test_without_avx2_torch_s_kernels_are_the_faster_ones(monkeypatch, compiler):
    monkeypatch.setattr(module, "best_isa", lambda: "portable")
    for reasons in (
        module.reasons_against_library(),
        reasons_against_native(torch.device("cpu"), torch.bfloat16),
        CpuNativeAttention.reasons_against(
            spec_of(2, 1, 64), torch.device("cpu"), torch.bfloat16, torch.bfloat16
        ),
    ):
        assert len(reasons) == 1 and "this CPU has no AVX2" in reasons[0]
    assert not (compiler.parent / "calls").exists()


@pytest.fixture
def nothing_loaded():
    """As in a process that has not looked for the library yet."""
    caches = module._load_best, module._load
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("best", ["avx512", "avx2"])
def test_without_a_compiler_one_warning_says_what_it_costs(best, monkeypatch, caplog, tmp_path):
    levels = isa_module.ISAS[isa_module.ISAS.index(best) :]
    monkeypatch.setattr(module, "best_isa", lambda: best)
    monkeypatch.setattr(module, "runnable_isas", lambda: levels)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))  # where nothing was compiled before
    find_compilers.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            reasons = [module.reasons_against_library() for _ in range(3)]
    finally:
        find_compilers.cache_clear()
    assert reasons[0] == reasons[2] and "apt install g++" in reasons[0][0]
    assert len(caplog.records) == 1
    assert "1.5 to 4 times as long" in caplog.text


@pytest.mark.usefixtures("nothing_loaded")
class TestTheNextLevel:
    """An assembler that is older than AMX, or an image without a compiler, from a CPU without AMX."""

    @pytest.fixture(autouse=True)
    def on_a_cpu_with_amx(self, monkeypatch):
        self.has(monkeypatch, *usable_isas(AMX | {"avx_vnni"}))
        monkeypatch.setattr(module, "open_library", lambda path: path)

    def has(self, monkeypatch, *levels):
        monkeypatch.setattr(module, "best_isa", lambda: levels[0])
        monkeypatch.setattr(module, "runnable_isas", lambda: levels)

    def can_build(self, monkeypatch, *levels):
        tried = []

        def build(isa):
            tried.append(isa)
            if isa not in levels:
                raise NoLibraryError(f"no such mnemonic in {isa}")
            return Path(isa)

        monkeypatch.setattr(module, "build", build)
        return tried

    def test_is_taken_where_the_best_one_cannot_be_had_and_one_warning_says_why(self, monkeypatch, caplog):
        tried = self.can_build(monkeypatch, "avx512_bf16", "avx512")
        assert {str(module.load_library()) for _ in range(3)} == {"avx512_bf16"} == {module.loaded_isa()}
        assert tried == ["amx", "avx512_bf16"]
        assert len(caplog.records) == 1
        assert "avx512_bf16 instead of amx: no such mnemonic in amx" in caplog.text

    def test_is_that_of_plain_fma_where_dot_products_are_slow(self, monkeypatch):
        self.has(monkeypatch, *usable_isas(AMX, slow_bf16=True))
        tried = self.can_build(monkeypatch, "avx512_vnni", "avx512_bf16")
        assert str(module.load_library()) == module.loaded_isa() == "avx512_vnni"
        assert tried == ["amx", "avx512_vnni"]

    def test_is_not_taken_where_torch_is_faster(self, monkeypatch, caplog):
        tried = self.can_build(monkeypatch, "portable")
        for _ in range(3):
            with pytest.raises(NoLibraryError, match="no such mnemonic in amx"):
                module.load_library()
        assert tried == ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"]
        assert len(caplog.records) == 1 and "1.5 to 4 times as long" in caplog.text

    def test_is_not_tried_where_the_best_one_has_taken_long(self, monkeypatch):
        tried = self.can_build(monkeypatch, "avx512")
        monkeypatch.setattr(module, "_PATIENCE_S", -1.0)
        with pytest.raises(NoLibraryError):
            module.load_library()
        assert tried == ["amx"]

    def test_is_another_level_than_one_that_is_asked_for_by_name(self, monkeypatch):
        self.can_build(monkeypatch, "avx512")
        with pytest.raises(NoLibraryError, match="in amx"):
            module.load_library("amx")


def test_a_library_that_does_not_load_is_a_reason(compiler, tmp_path):
    with pytest.raises(NoLibraryError, match="cannot load the CPU kernels"):
        open_library(build("avx2", tmp_path))


@pytest.mark.parametrize(
    ("flags", "isas"),
    [
        (frozenset(), ["portable"]),
        (frozenset({"sse2", "avx2"}), ["portable"]),
        (AVX2, ["avx2", "portable"]),
        (AVX2 | {"avx_vnni"}, ["avx2_vnni", "avx2", "portable"]),
        (AVX512, ["avx512", "avx2", "portable"]),
        (AVX512_VNNI, ["avx512_vnni", "avx512", "avx2", "portable"]),
        (AVX512_BF16, ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]),
        (AMX, ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]),
        (AMX - {"amx_bf16"}, ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]),
        (AMX - {"avx512_vnni"}, ["avx512", "avx2", "portable"]),
        (AVX512 | {"avx512_bf16"}, ["avx512", "avx2", "portable"]),
        (AVX512 - {"avx512vl"} | {"avx512_bf16", "avx512_vnni"}, ["avx2", "portable"]),
        (NEON, ["neon", "portable"]),  # Cortex-A72
        (NEON | {"asimddp"}, ["neon_dot", "neon", "portable"]),  # Neoverse N1, M1
        (NEON | {"asimddp", "i8mm"}, ["neon_i8mm", "neon_dot", "neon", "portable"]),
        (NEON | {"asimddp", "bf16"}, ["neon_dot", "neon", "portable"]),
        (
            NEON | {"asimddp", "i8mm", "bf16"},  # Neoverse V1, N2, M2
            ["neon_bf16", "neon_i8mm", "neon_dot", "neon", "portable"],
        ),
    ],
)
def test_levels_by_the_cpu_s_flags(flags, isas):
    assert usable_isas(flags) == isas


@pytest.mark.parametrize(
    ("flags", "isas"),
    [
        (AVX512, ["avx512", "avx2", "portable"]),
        (AVX512_VNNI, ["avx512_vnni", "avx512", "avx2", "portable"]),
        (AVX512_BF16, ["avx512_vnni", "avx512_bf16", "avx512", "avx2", "portable"]),
        (AMX, ["amx", "avx512_vnni", "avx512_bf16", "avx512", "avx2", "portable"]),
    ],
)
def test_plain_fma_is_preferred_to_slow_dot_products(flags, isas):
    assert usable_isas(flags, slow_bf16=True) == isas


@pytest.mark.parametrize(
    ("vendor", "model", "slow"),
    [
        ("GenuineIntel", "143", True),  # Sapphire Rapids
        ("GenuineIntel", "207", True),  # Emerald Rapids
        ("GenuineIntel", "85", False),  # Cooper Lake
        ("AuthenticAMD", "17", False),
        ("", "", False),
    ],
)
def test_whose_dot_products_are_slow_is_told_by_the_cpu_s_name(monkeypatch, vendor, model, slow):
    lines = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t\t: {model}\nflags\t\t: avx2 fma\n"
    others = lines.replace(vendor, "GenuineIntel").replace(model, "143") if vendor else ""
    monkeypatch.setattr(Path, "read_text", lambda path: f"{lines}\n{others}")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert isa_module.has_slow_bf16() is slow
    assert cpu_flags() == {"avx2", "fma"}


@pytest.mark.parametrize(
    ("machine", "flags"), [("aarch64", {"fp", "asimd", "asimddp"}), ("armv7l", set()), ("riscv64", set())]
)
def test_features_of_arm_are_flags(monkeypatch, machine, flags):
    lines = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\n"
    monkeypatch.setattr(Path, "read_text", lambda path: f"{lines}\nprocessor\t: 1\nFeatures\t: fp\n")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert cpu_flags() == flags
    assert not isa_module.has_slow_bf16()


def test_this_cpu_can_run_something():
    assert runnable_isas()[-1] == "portable"
    assert set(runnable_isas()) <= set(usable_isas(cpu_flags()))


def test_a_level_by_name_is_asked_for_its_registers_first():
    """A process of its own: a process that has AMX's registers keeps them."""
    if "amx" not in runnable_isas():
        pytest.skip("this CPU has no AMX")
    code = (
        "import torch\n"
        "from engine.model_runner.kernels.cpu.library import load_library\n"
        "from engine.model_runner.kernels.native_linear import NativeLinear\n"
        "one = torch.ones(32, 32, dtype=torch.bfloat16)\n"
        "assert NativeLinear(load_library('amx'), one)(one).eq(32).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_level_that_this_process_cannot_run_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(module, "runnable_isas", lambda: ("avx2", "portable"))
    with pytest.raises(NoLibraryError, match="cannot run amx, only avx2, portable"):
        module.load_library("amx")


@pytest.fixture
def amx_cpu(monkeypatch):
    """A CPU with AMX, whose registers the system refuses or grants."""

    def grant(reason: str) -> None:
        monkeypatch.setattr(isa_module, "cpu_flags", lambda: AMX)
        monkeypatch.setattr(isa_module, "has_slow_bf16", lambda: False)
        monkeypatch.setattr(isa_module, "reason_against_tiles", lambda: reason)

    runnable_isas.cache_clear()
    yield grant
    runnable_isas.cache_clear()


def test_where_the_system_refuses_amx_the_next_level_is_taken_and_said_why(amx_cpu, caplog):
    amx_cpu("the system refuses its registers")
    assert runnable_isas()[0] == "avx512_bf16"
    assert "without AMX" in caplog.text and "refuses its registers" in caplog.text


def test_amx_is_the_best_level_where_the_system_grants_it(amx_cpu, caplog):
    amx_cpu("")
    assert runnable_isas()[0] == "amx" and not caplog.records


def test_a_refusal_names_the_system_s_error(monkeypatch):
    """The real call, for registers that no CPU has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the call is that of x86")
    monkeypatch.setattr(isa_module, "_XTILEDATA", 1000)
    assert "arch_prctl: " in isa_module.reason_against_tiles()


@pytest.mark.slow
def test_on_one_thread_it_is_left_alone_where_torch_has_more(tmp_path, monkeypatch):
    """As where Clang is the only compiler, whose threads torch's runtime does not have."""
    if not (compilers := find_compilers()):
        pytest.skip("no C++ compiler")
    alone = compilers[0]._replace(openmp=False)
    monkeypatch.setattr("engine.model_runner.kernels.cpu.build.find_compilers", lambda: (alone,))
    library = open_library(build("portable", tmp_path, options=("-O0",)))
    monkeypatch.setattr(module, "best_isa", lambda: "avx512")
    monkeypatch.setattr(module, "load_library", lambda: library)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert "on one thread instead of 2" in module.reasons_against_library()[0]
        torch.set_num_threads(1)
        assert module.reasons_against_library() == []
    finally:
        torch.set_num_threads(before)


def test_it_runs_on_torch_s_threads(best_library: ctypes.CDLL):
    """One OpenMP runtime is mapped, and calling our kernels starts no thread beside those that torch has."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.ones(1 << 20).exp_().sum()
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        x = torch.ones(4096, 64)
        out = torch.empty_like(x)
        best_library.add_rms_norm(
            None, x.data_ptr(), x[0].data_ptr(), out.data_ptr(), 4096, 64, 1e-5, False, False
        )
        assert torch.allclose(out, torch.ones(()), atol=1e-4)
        assert (
            len(list(Path("/proc/self/task").iterdir())) <= num_threads
        )  # those of larger teams may be ending
    finally:
        torch.set_num_threads(before)
    maps: Any = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {
        line.split(maxsplit=5)[-1]
        for line in maps
        if "/libgomp" in line or "/libomp" in line or "/libiomp" in line
    }
    # scikit-learn has its own, which sentence-transformers loads in other tests of this process
    runtimes = {runtime for runtime in runtimes if "scikit_learn.libs" not in runtime}
    assert len(runtimes) == 1 and Path(torch.__file__).parent in Path(runtimes.pop()).parents


def test_calls_of_few_pieces_end_no_threads(best_library: ctypes.CDLL):
    """The runtime ends those that a smaller team has no use for, and the next larger one pays for new ones."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        threads = []
        for num_rows in (4096, 600, 4096):  # of 64: enough for all, for 2, for all
            x = torch.ones(num_rows, 64)
            best_library.add_rms_norm(
                None, x.data_ptr(), x[0].data_ptr(), x.data_ptr(), num_rows, 64, 1e-5, False, False
            )
            threads.append({path.name for path in Path("/proc/self/task").iterdir()})
        assert threads[0] == threads[2]
    finally:
        torch.set_num_threads(before)
