"""Each fault of a machine gives exactly its line: one check that is not well, with its verdict, words and fix."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from engine.cli.doctor.check import CheckStatus
from engine.cli.doctor.compute import TorchFacts, check_compute, covers, gather_torch, read_answer
from engine.cli.doctor.machine import check_machine
from engine.cli.doctor.machine_facts import Process, Unmet
from engine.launch.resolve.host_facts import HostFacts
from engine.runtime.config.config_sources import from_arguments, merge

from .conftest import FLAGS, GIB, GPU, cuda_torch, host, machine, torch

WARN, FAIL = CheckStatus.WARN, CheckStatus.FAIL
CUDA_VERSION = "2.14.1+cu130"
GPU_HOST = host(gpus=(GPU,), torch_version=CUDA_VERSION)


def config(**settings):
    return merge(from_arguments(settings)).config


def not_well(checks):
    return [check for check in checks if not check.is_well]


def test_a_machine_that_is_well_has_one_line_for_each_check_and_none_to_worry_about():
    checks = [*check_machine(machine(), config()), *check_compute(torch(), host(), config())]
    assert not_well(checks) == []
    codes = (
        "python packages driver memory shm nofile orphans sockets cache cores port server torch cpu kernels"
    )
    assert " ".join(check.code for check in checks) == codes


@pytest.mark.parametrize("limits", [(1024, 524288), (256, -1), (-1, -1)])
def test_the_soft_limit_of_open_files_is_raised_by_the_server_and_no_worry(limits):
    assert not_well(check_machine(machine(open_files=limits), config())) == []


def test_so_has_one_with_a_gpu(gpu_host):
    facts = machine(host=gpu_host, has_nvidia_card=True, has_nvidia_device=True)
    checks = [*check_machine(facts, config()), *check_compute(cuda_torch(), gpu_host, config())]
    assert not_well(checks) == []
    assert {check.code: check.text for check in checks}["gpu"].startswith("compute capability 9.0")


MACHINE_FAULTS = [
    ({"python": (3, 10, 9)}, {}, "python", FAIL, "3.10.9, 3.11 is needed", "install Python 3.11"),
    ({"is_64_bit": False}, {}, "python", FAIL, "32 bits", "64-bit"),
    ({"system": "darwin"}, {}, "python", WARN, "darwin", "use Linux"),
    (
        {"unmet": (Unmet("uvloop", "0.21", ""), Unmet("rich", "13.7", "12.0"))},
        *({}, "packages", FAIL, r"uvloop is missing, rich 12.0 \(13.7 is needed\)"),
        "pip install 'uvloop>=0.21' 'rich>=13.7'",
    ),
    ({"has_nvidia_device": True}, {}, "driver", WARN, "lists no GPU", "nvidia-smi"),
    ({"has_nvidia_card": True}, {}, "driver", WARN, "no driver can be seen", "--gpus all"),
    ({"host": host(mem_available_bytes=GIB // 2)}, {}, "memory", WARN, "512 MiB", "raise the limit"),
    (
        {"host": host(cgroup_free_bytes=GIB // 4)},
        *({}, "memory", WARN, "256 MiB .* the machine has 16.0 GiB", "raise the limit"),
    ),
    (
        {"host": GPU_HOST, "shm_free_bytes": 64 << 20},
        *({"tp": 2}, "shm", WARN, "64 MiB free", "--shm-size=1g"),
    ),
    ({"host": GPU_HOST, "shm_free_bytes": None}, {"tp": 2}, "shm", FAIL, "does not exist", "mount"),
    (
        {"open_files": (256, 4096)},
        {},
        "nofile",
        WARN,
        "enough for 3968 clients, and --max-conn",
        "-connections 3968",
    ),
    ({"open_files": (20, 60)}, {}, "nofile", FAIL, "60 files, 128 are needed", "raise the hard limit"),
    (
        {"server_error": "keys: there is no API key in it; write one"},
        {},
        "server",
        FAIL,
        "no API key",
        "write one",
    ),
    ({"host": host(cpu_quota=0.5)}, {}, "cores", WARN, "0.5 of one CPU", "--cpus"),
    (
        {"port_error": "127.0.0.1:80 is in use; use --port 81", "port_holder": "pid 7, nginx"},
        *({}, "port", FAIL, r"is in use \(it is pid 7, nginx\)", "use --port 81"),
    ),
    ({"port_error": "host 'x' has no address; use --host y"}, {}, "port", FAIL, "no address", "--host y"),
    (
        {"orphans": (Process(12, "engine: scheduler"), Process(13, "engine: detokenizer"))},
        *({}, "orphans", WARN, r"12 \(engine: scheduler\), 13", "kill -9 12 13"),
    ),
    (
        {"cache_error": "/root cannot be written; set ENGINE_CACHE_DIR"},
        {},
        "cache",
        WARN,
        "/root",
        "set ENGINE",
    ),
]


@pytest.mark.parametrize(("fault", "settings", "code", "verdict", "text", "fix"), MACHINE_FAULTS)
def test_each_fault_of_a_machine_is_its_own_line(fault, settings, code, verdict, text, fix):
    (check,) = not_well(check_machine(machine(**fault), config(**settings)))
    assert (check.code, check.verdict) == (code, verdict)
    assert re.search(text, check.text)
    assert fix in check.fix


NO_AVX2 = frozenset({"avx", "fma"})
TORCH_FAULTS = [
    (
        TorchFacts(error="No module named 'torch'"),
        host(torch_version=""),
        "torch",
        FAIL,
        "not installed",
        "pip",
    ),
    (
        *(TorchFacts(error="ImportError: libcudart.so.13"), host(), "torch", FAIL),
        *("2.14.1.cpu cannot be imported: ImportError: libcudart", "--force-reinstall torch"),
    ),
    (torch(), host(gpus=(GPU,)), "torch", WARN, "without CUDA, so H100 is not used", ".[cuda]"),
    (cuda_torch(capability=None), GPU_HOST, "gpu", FAIL, "finds no GPU", "driver for CUDA 13.0"),
    (
        cuda_torch(capability=(12, 0)),
        GPU_HOST,
        "gpu",
        FAIL,
        "sm_80, sm_90, this one is sm_120",
        "--device cpu",
    ),
    (cuda_torch(archs=()), GPU_HOST, "gpu", FAIL, "code for no GPU", "--device cpu"),
    (
        cuda_torch(kernel_lines=("not used: sgl_kernel: built for torch 2.11; pip install x",)),
        *(GPU_HOST, "kernels", WARN, "^not used: sgl_kernel: built for torch 2.11$", "pip install x"),
    ),
    (
        *(torch(isa="portable"), host(cpu_flags=NO_AVX2), "cpu", WARN),
        *("no bfloat16 .*; no AVX2 with FMA, .* dequantized", "use a CPU with AVX2"),
    ),
    (
        torch(cpu_kernels_error="no C++ compiler for the CPU kernels; install one", compilers=()),
        *(host(), "kernels", WARN, "no C.. compiler .* 1.5 to 4 times", "apt install g++"),
    ),
    (
        torch(cpu_kernels_error="would run on one thread instead of 8; install GCC"),
        *(host(), "kernels", WARN, "on one thread", "install GCC"),
    ),
]


@pytest.mark.parametrize(("facts", "on", "code", "verdict", "text", "fix"), TORCH_FAULTS)
def test_each_fault_of_torch_and_its_kernels_is_its_own_line(facts, on: HostFacts, code, verdict, text, fix):
    (check,) = not_well(check_compute(facts, on, config()))
    assert (check.code, check.verdict) == (code, verdict)
    assert re.search(text, check.text), check.text
    assert fix in check.fix


def test_a_cpu_without_bfloat16_instructions_is_well_where_our_kernels_multiply_bytes():
    on = host(cpu_flags=FLAGS - {"avx512_bf16", "amx_bf16"})
    assert not_well(check_compute(torch(isa="avx512_vnni"), on, config())) == []


@pytest.mark.parametrize(
    ("isa", "text"),
    [
        ("neon_dot", "instructions: neon_dot; with i8mm and bf16 prompts would be faster"),
        ("neon_bf16", "instructions: neon_bf16"),
    ],
)
def test_the_instructions_of_arm_are_named(isa, text):
    on = host(cpu_flags=frozenset({"fp", "asimd", "asimddp"}))
    checks = {check.code: check for check in check_compute(torch(isa=isa, loaded_isa=isa), on, config())}
    assert (checks["cpu"].text, checks["cpu"].is_well) == (text, True)
    assert checks["kernels"].text == f"the engine's own, for {isa}"


def test_a_gpu_that_is_not_asked_for_is_no_matter():
    assert not_well(check_compute(cuda_torch(capability=None), GPU_HOST, config(device="cpu"))) == []


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 6), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (9, 1), False),
        (("compute_80",), (12, 0), True),
        (("compute_90",), (8, 0), False),
        (("sm_120",), (12, 0), True),
        (("sm_100",), (10, 3), True),
        (("gfx90a", "odd"), (9, 0), False),
    ],
)
def test_which_code_runs_on_which_gpu(archs, capability, expected):
    assert covers(archs, capability) is expected


def test_how_a_probe_ended_is_a_finding():
    assert read_answer(-signal.SIGABRT, "", "boom").error == "its process was ended by signal 6"
    assert read_answer(1, "", "Traceback\nImportError: no\n\n").error == "ImportError: no"
    assert read_answer(3, "", "").error == "its process ended with exit code 3"
    said = json.dumps({"version": "2", "capability": [9, 0], "kernels": {"triton": "3"}})
    assert read_answer(-6, f"noise\n{said}\nmore noise", "") == TorchFacts(
        version="2", capability=(9, 0), kernels={"triton": "3"}
    )


def test_a_probe_that_does_not_end_is_a_finding():
    assert gather_torch(time_limit_s=0.001).error == "it did not end within 0.001 s"


def test_directories_of_killed_engines_are_told_and_no_worry():
    checks = {
        c.code: c for c in check_machine(machine(socket_dirs=(Path("/tmp/engine-sockets-x"),)), config())
    }
    assert checks["sockets"].is_well
    assert "/tmp/engine-sockets-x" in checks["sockets"].text


def test_the_kernels_are_named_by_the_level_that_is_loaded():
    [own] = [check for check in check_compute(torch(), host(), config()) if check.code == "kernels"]
    assert own.text == "the engine's own, for amx"
    facts = torch(
        loaded_isa="avx512_bf16"
    )  # an assembler without AMX, or files from another machine and no compiler
    [own] = [check for check in check_compute(facts, host(), config()) if check.code == "kernels"]
    assert own.text == "the engine's own, for avx512_bf16: those for amx are not available"
