"""The kernels' tests once more with the address sanitizer: what they read and write is theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model_runner.kernels.cpu.compiler import find_compilers

TESTS = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_kernel_leaves_its_memory(tmp_path):
    if "ENGINE_TEST_SANITIZE" in os.environ:
        pytest.skip("this is that run")
    if not (compilers := find_compilers()):
        pytest.skip("no C++ compiler")
    runtime = subprocess.run(
        [compilers[0].path, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_file():
        pytest.skip("the compiler has no address sanitizer")
    env = os.environ | {
        "LD_PRELOAD": runtime,
        # Python and torch keep what they have until the end; pytest would swallow what is written to the terminal.
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={tmp_path}/report",
        "ENGINE_TEST_SANITIZE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    files = [
        "model_runner/kernels/cpu/test_native_ops.py",
        "model_runner/kernels/cpu/test_compressed_linear.py",
        "model_runner/kernels/cpu/test_native_blocks.py",
        "model_runner/kernels/cpu/test_native_experts.py",
        "model_runner/attention/test_cpu_native.py",
        "model_runner/sampling/test_native_backend.py",
    ]
    assert [file for file in files if not (TESTS / file).is_file()] == []
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            "-o",
            "timeout=800",
        ]
        + [str(TESTS / file) for file in files],
        check=False,
        env=env,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=850,
    )
    reports = "".join(path.read_text()[:4000] for path in tmp_path.glob("report*"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + reports
    assert " passed" in done.stdout
