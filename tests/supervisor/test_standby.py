"""A process that is started before its settings are known: it imports its modules, waits, and is taken or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from engine import __main__ as entry
from engine.launch.child.control import Role
from engine.supervisor.child_process import ChildProcess
from engine.supervisor.standby import Standby, start_module

WAITS = "waits_for_a_signal"


@pytest.fixture
def standby(tmp_path, monkeypatch):
    (tmp_path / f"{WAITS}.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Standby(WAITS) as standby:
        yield standby


def kill(pid: int) -> None:
    """Kill a child of this process, and wait until it is dead; its status can still be collected."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.real_process
def test_the_one_process_is_taken_once(standby):
    standby.start()
    standby.start()
    assert standby.take("another_module") is None
    started = standby.take(WAITS)
    assert started is not None and standby.take(WAITS) is None

    child = ChildProcess(Role.SCHEDULER, WAITS, started=started)
    assert child.pid == started.process.pid
    child.kill()
    assert child.describe_end() == "scheduler was killed by the engine, because it did not end"


@pytest.mark.real_process
def test_a_dead_one_is_not_taken(standby):
    standby.start()
    assert standby._started is not None
    kill(standby._started.process.pid)
    assert standby.take(WAITS) is None
    standby.close()


@pytest.mark.real_process
def test_one_that_nobody_takes_is_killed(standby):
    standby.start()
    assert standby._started is not None
    process = standby._started.process
    standby.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.real_process
@pytest.mark.parametrize("error", ["", "raise ValueError('no such library')"])
def test_a_process_imports_before_it_has_settings(tmp_path, monkeypatch, error):
    reader, writer = os.pipe()
    room = tmp_path / "room_that_imports"
    room.mkdir()
    (room / "__init__.py").touch()
    (room / "__main__.py").write_text(
        "from engine.launch.child.child import run_child\nrun_child(__package__)\n"
    )
    (room / "process.py").write_text(f"import os\nos.write({writer}, b'imported')\n{error}\n")
    monkeypatch.syspath_prepend(tmp_path)

    process, channel = start_module(room.name, "scheduler", writer)
    os.close(writer)
    assert os.read(reader, 100) == b"imported"
    assert process.poll() is None  # an error is reported when the settings say how to log it
    channel.close()
    assert process.wait(60) == 0  # the supervisor is gone
    os.close(reader)


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        ("serve", True),
        ("serve ./model --port 1", True),
        ("serve --help", False),
        ("serve ./model --print-config", False),
        ("chat", False),
        ("", False),
    ],
)
def test_which_command_line_starts_a_scheduler_first(monkeypatch, arguments, starts):
    started: list[Standby] = []

    def start(self: Standby) -> None:
        started.append(self)

    monkeypatch.setattr(Standby, "start", start)
    monkeypatch.setattr(sys, "argv", ["engine", *arguments.split()])
    with entry._scheduler_ahead() as standby:
        assert (started == [standby]) if starts else (started == [] and standby is None)


def test_what_runs_before_the_scheduler_is_started_imports_little():
    """The scheduler is on the longest way of a start: nothing may delay it."""
    code = "import sys, engine.__main__, engine.supervisor.standby; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ours = {name for name in loaded.split() if name.startswith("engine.")}
    assert ours == {
        *("engine.__main__", "engine.supervisor", "engine.supervisor.standby"),
        *("engine.launch", "engine.launch.resolve", "engine.launch.resolve.nvidia_gpus"),
    }
    assert not {"asyncio", "msgspec", "numpy", "pydantic", "torch", "typer", "zmq"} & set(loaded.split())
