"""Which kernel packages can be used: every way in which one cannot is one line with what mends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.model_runner.kernels.probe import (
    Facts,
    Installed,
    Trial,
    gather_facts,
    judge,
    log_lines,
    try_sgl_kernel,
)

GOOD = Facts(
    torch_version="2.14.1+cu130",
    torch_cuda="13.0",
    driver_works=True,
    capability=(9, 0),
    triton_version="3.8.0",
    compiler="/usr/bin/gcc",
    sgl_kernel=Installed("sglang-kernel", "0.4.10", torch="2.14"),
)


def test_what_works_is_used_and_not_talked_about():
    probe = judge(GOOD)
    assert (probe.sgl_kernel.version, probe.triton.version) == ("0.4.10", "3.8.0")
    assert probe.capability == (9, 0)
    assert log_lines(probe) == []


# What is different, who cannot be used, what the line says, what mends it.
PROBLEMS = {
    "no sgl_kernel": (
        {"sgl_kernel": None},
        "sgl_kernel",
        "not installed",
        "pip install 'sglang-kernel>=0.4.9'",
    ),
    "pinned to another torch": (
        {"torch_version": "2.11.0+cu130"},
        "sgl_kernel",
        "sglang-kernel 0.4.10 was built for torch 2.14, this is 2.11.0+cu130",
        "pip install 'sglang-kernel>=0.4.2,<0.4.6'",
    ),
    "not pinned, but known": (
        {"sgl_kernel": Installed("sglang-kernel", "0.4.5")},
        "sgl_kernel",
        "sglang-kernel 0.4.5 was built for torch 2.11, this is 2.14.1+cu130",
        "pip install 'sglang-kernel>=0.4.9'",
    ),
    "the trap among its releases": (
        {"sgl_kernel": Installed("sglang-kernel", "0.4.6.post1"), "torch_version": "2.11.0"},
        "sgl_kernel",
        "built for torch 2.13",
        "pip install 'sglang-kernel>=0.4.2,<0.4.6'",
    ),
    "the old name": (
        {"sgl_kernel": Installed("sgl-kernel", "0.3.21")},
        "sgl_kernel",
        "sgl-kernel 0.3.21 was built for torch 2.9",
        "pip install 'sglang-kernel>=0.4.9'",
    ),
    "a torch for which there is none": (
        {"torch_version": "2.12.0", "sgl_kernel": None},
        "sgl_kernel",
        "not installed",
        "no release of it is known for torch 2.12; pip install 'torch==2.14.*' 'sglang-kernel>=0.4.9'",
    ),
    "it aborts": (
        {"sgl_error": "its trial was ended by signal 6"},
        "sgl_kernel",
        "does not work here: its trial was ended by signal 6",
        "it is the release for torch 2.14 and CUDA 13; see that nvidia-smi shows a driver for CUDA 13.0",
    ),
    "another CUDA": (
        {
            "torch_version": "2.11.0+cu129",
            "torch_cuda": "12.9",
            "sgl_kernel": Installed("sglang-kernel", "0.4.5"),
            "sgl_error": "OSError: libcudart.so.13: cannot open shared object file",
        },
        "sgl_kernel",
        "libcudart.so.13",
        "for CUDA 13, and this torch is for CUDA 12.9; install torch 2.11 for CUDA 13, or continue",
    ),
    "nobody knows what it was built for": (
        {"sgl_kernel": Installed("sgl_kernel", "of an unknown version"), "sgl_error": "ImportError: no"},
        "sgl_kernel",
        "sgl_kernel of an unknown version does not work here: ImportError: no",
        "pip install 'sglang-kernel>=0.4.9'",
    ),
    "built elsewhere": (
        {"sgl_kernel": Installed("sglang-kernel", "0.4.5+cu130")},
        "sgl_kernel",
        "sglang-kernel 0.4.5+cu130 was built for torch 2.11, this is 2.14.1+cu130",
        "pip install 'sglang-kernel>=0.4.9'",
    ),
    "no Triton": ({"triton_version": None}, "triton", "not installed", "pip install --force-reinstall torch"),
    "Triton is broken": (
        {"triton_version": None, "triton_error": "libtriton.so: wrong ELF class"},
        "triton",
        "cannot be imported (libtriton.so: wrong ELF class)",
        "pip install --force-reinstall torch",
    ),
    "no compiler": ({"compiler": None}, "triton", "no C compiler", "apt-get install gcc"),
    "no headers": (
        {"has_python_headers": False},
        "triton",
        "Python's headers",
        "apt-get install python3-dev",
    ),
    "Triton's driver": ({"triton_error": "RuntimeError: 0"}, "triton", "RuntimeError: 0", "nvidia-smi"),
    "the interpreter": ({"interpreted": True}, "triton", "TRITON_INTERPRET is set", "unset TRITON_INTERPRET"),
    "no driver": (
        {"driver_works": False, "capability": None},
        "sgl_kernel and triton",
        "no NVIDIA driver",
        "nvidia-smi",
    ),
    "an old GPU": (
        {"capability": (7, 5)},
        "sgl_kernel and triton",
        "compute capability 7.5, 8.0 is needed",
        "or --device cpu",
    ),
    "torch for CPUs": (
        {"torch_cuda": None, "driver_works": False, "capability": None, "torch_version": "2.14.1+cpu"},
        "sgl_kernel and triton",
        "torch 2.14.1+cpu was built without CUDA",
        "pip install --force-reinstall torch",
    ),
}


@pytest.mark.parametrize(("change", "names", "reason", "fix"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_is_one_line_with_what_mends_it(change, names, reason, fix):
    probe = judge(replace(GOOD, **change))
    (line,) = log_lines(probe)
    assert "\n" not in line
    assert line.startswith(f"not used: {names}: ")
    assert reason in line
    assert fix in line.partition("; ")[2]
    assert (probe.sgl_kernel.version is None) == ("sgl_kernel" in names)
    assert (probe.triton.version is None) == ("triton" in names)


@pytest.mark.parametrize("version", ["0.4.2", "0.4.5", "0.4.6", "0.4.5+cu130", "0.4.6+cu130.2", "0.4.3rc1"])
def test_releases_for_the_torch_that_is_there(version):
    facts = replace(GOOD, torch_version="2.11.0+cu130", sgl_kernel=Installed("sglang-kernel", version))
    assert judge(facts).sgl_kernel.version == version


@pytest.mark.parametrize("version", ["0.4.9rc1", "0.4.7", "0.4.10.post2"])
def test_releases_that_pin_their_torch_are_not_judged_by_their_number(version):
    facts = replace(GOOD, torch_version="2.12.0", sgl_kernel=Installed("sglang-kernel", version))
    assert judge(facts).sgl_kernel.version == version


SGL_TRACEBACK = '''
raise ImportError("""
[sgl_kernel] CRITICAL: Could not load any common_ops library!
GPU Info:
- Compute capability: 90
Error details from previous import attempts:
- ImportError: common_ops.abi3.so: undefined symbol: _ZNK3c106SymInt6sym_neERKS0_
- ModuleNotFoundError: No module named 'common_ops'
""")
'''


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        ("print('{\"error\": null}')", None),
        (
            "print('noise'); print('{\"error\": \"a norm of ones is not ones\"}')",
            "a norm of ones is not ones",
        ),
        ("print('{\"error\": null}'); print('unloaded'); print('[1]')", None),
        ("print('unloaded')", "its trial ended without a result"),
        ("pass", "its trial ended without a result"),
        ("import os; os.abort()", "its trial was ended by signal 6"),
        ("raise SystemExit(3)", "its trial ended with exit code 3"),
        ("raise OSError('libnvrtc.so.13: cannot open')", "OSError: libnvrtc.so.13: cannot open"),
        (
            SGL_TRACEBACK,
            "ImportError: common_ops.abi3.so: undefined symbol: _ZNK3c106SymInt6sym_neERKS0_",
        ),
    ],
)
def test_a_trial_may_die(trial, expected):
    assert try_sgl_kernel(0, trial) == Trial(expected)


def test_a_trial_is_of_the_gpu_that_is_asked_about():
    assert try_sgl_kernel(3, "import json, sys; print(json.dumps({'error': sys.argv[1]}))").error == "3"


def test_a_trial_says_for_which_heads_there_is_code():
    """A reduced wheel has some only, and a call without code ended in the first step of serving."""
    answer = {"error": None, "flash_dims": [128, 64], "flash_fp8_dims": [128]}
    assert try_sgl_kernel(0, f"import json; print(json.dumps({answer}))") == Trial(None, (128, 64), (128,))


def test_a_trial_may_hang():
    assert try_sgl_kernel(0, "while True: pass", time_limit_s=0.2).error == "its trial took more than 0.2 s"


@pytest.mark.slow  # imports torch
def test_the_trial_itself_says_that_it_is_not_installed(monkeypatch):
    """The real one, as far as it comes without the package."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = try_sgl_kernel(0).error
    assert error is not None and ("sgl_kernel" in error or "GPU" in error or "CUDA" in error)


def test_looking_at_this_machine_always_ends_in_a_verdict():
    facts = gather_facts()
    probe = judge(facts)
    assert facts.driver_works or len(log_lines(probe)) == 1
