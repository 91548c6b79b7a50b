"""How the end of a process is described: who killed it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engine.launch.child.control import Role
from engine.supervisor.child_process import ChildProcess

pytestmark = pytest.mark.real_process


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildProcess:
    (tmp_path / "waits_for_a_signal.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.syspath_prepend(tmp_path)
    return ChildProcess(Role.DETOKENIZER, "waits_for_a_signal")


def test_a_process_that_the_engine_kills(child: ChildProcess) -> None:
    child.kill()
    assert child.describe_end() == "detokenizer was killed by the engine, because it did not end"


def test_a_process_that_is_suspended_does_not_end_by_itself(child: ChildProcess) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    child.abort()
    child.kill()
    assert child.describe_end() == "detokenizer was killed by the engine, because it did not end"


def test_a_process_that_another_one_kills(child: ChildProcess) -> None:
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.kill()
    assert child.describe_end() == (
        "detokenizer was killed by SIGKILL (by another process, or by the kernel because memory ran out)"
    )
