"""Processes that end with their parent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.supervisor.fleet.tied_process import TiedProcess

pytestmark = pytest.mark.real_process

DEADLINE_S = 30.0
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
STUBBORN = (
    "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(1000)"
)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_it_becomes_the_command_with_its_variables_and_says_how_it_ended(tmp_path: Path):
    path = tmp_path / "pid"
    code = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getpid()} {os.environ[\"X\"]}'); sys.exit(3)"
    process = TiedProcess([sys.executable, "-c", code, str(path)], {"X": "y"}, is_silent=True)
    wait_for(lambda: process.exit_code is not None)
    assert path.read_text() == f"{process.pid} y"
    assert (process.exit_code, process.describe_end()) == (
        3,
        "exited with code 3; its last lines above say why",
    )


def test_signals_and_their_names(tmp_path: Path):
    process = TiedProcess(SLEEP, {}, is_silent=True)
    process.terminate()
    wait_for(lambda: process.exit_code is not None)
    assert process.describe_end() == "was killed by SIGTERM"
    process.terminate()
    process.kill()  # both without effect

    path = tmp_path / "started"
    stubborn = TiedProcess([sys.executable, "-c", STUBBORN, str(path)], {}, is_silent=True)
    wait_for(path.exists)
    stubborn.terminate()
    assert stubborn.describe_end() == "runs"
    stubborn.kill()
    assert stubborn.exit_code == -signal.SIGKILL
    assert stubborn.describe_end() == "was killed, because it did not end in time"


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path):
    path = tmp_path / "pid"
    program = (
        "import sys, time\nfrom engine.supervisor.fleet.tied_process import TiedProcess\n"
        f"process = TiedProcess({SLEEP!r}, {{}}, is_silent=True)\n"
        "open(sys.argv[1], 'w').write(str(process.pid))\ntime.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(path)])
    wait_for(lambda: path.exists() and path.read_text() != "")
    pid = int(path.read_text())
    parent.kill()
    parent.wait()

    def is_gone() -> bool:
        try:
            return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True

    wait_for(is_gone)
