"""Teams of threads (`team.h`) by themselves: nothing is done twice, forgotten, or read before it is written.

By threads of C++ and not by OpenMP's, whose synchronization the thread sanitizer does not see.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.model_runner.kernels import cpu
from engine.model_runner.kernels.cpu.compiler import find_compilers

SANITIZE = ("-fsanitize=thread", "-g")


@pytest.mark.parametrize(
    ("options", "num_teams"),
    [((), 60), pytest.param(SANITIZE, 200, marks=pytest.mark.slow)],
    ids=["plain", "sanitized"],
)
def test_every_phase_sees_what_the_one_before_has_written(tmp_path, options, num_teams):
    if not (compilers := find_compilers()):
        pytest.skip("no C++ compiler")
    program = tmp_path / "stress"
    command = [compilers[0].path, "-std=c++20", "-O2", "-pthread", *options, f"-I{Path(cpu.__file__).parent}"]
    built = subprocess.run(
        [*command, str(Path(__file__).with_name("team_stress.cpp")), "-o", str(program)],
        check=False,
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr and options:
        pytest.skip("the compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    for num_threads in (2, 3, 8):
        done = subprocess.run(
            [str(program), str(num_threads), str(num_teams)],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        assert done.stdout == f"{num_teams} teams of {num_threads} threads\n"
