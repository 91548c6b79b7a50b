"""`start_engine`: an engine under a real supervisor, in processes of its own; see `supervised_engine.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0  # for what takes a second or two on an idle machine
SCRIPT = Path(__file__).parent / "supervised_engine.py"


class Engine:
    """A supervisor in a process of its own, seen from outside.

    Attributes:
        process: the supervisor.
        tmp: where its socket directory and the notes of its children are.
    """

    def __init__(self, tmp: Path, arguments: dict[str, Any]) -> None:
        self.tmp = tmp
        self._log = tmp / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), json.dumps(arguments)],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TMPDIR": str(tmp), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def read(self) -> dict[str, Any]:
        """The next line it prints."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert readable, f"no line within {DEADLINE_S} s; log:\n{self.log}"
        line = self.process.stdout.readline()
        assert line, f"ended without a word; log:\n{self.log}"
        values: dict[str, Any] = json.loads(line)
        return values

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit code and message. No child and no socket directory is left behind then."""
        while "exit_code" not in (last := self.read()):
            pass  # it may have been ready before, if what ends it came later
        code = self.process.wait(DEADLINE_S)
        assert code == last["exit_code"]
        assert [pid for pid in self.pids.values() if not self.wait_for_end(pid, 0)] == []
        assert list(self.tmp.glob("engine-*")) == []
        return code, str(last["message"])

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pids(self) -> dict[str, int]:
        """The children's process ids, as the supervisor logs them."""
        return {role: int(pid) for role, pid in re.findall(r"started child=(\w+) pid=(\d+)", self.log)}

    def wait_for_note(self, name: str) -> str:
        """Wait until a child has left a note; its text."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (self.tmp / name).exists():
            assert time.monotonic() < deadline_s, f"no note {name}; log:\n{self.log}"
            select.select([], [], [], 0.01)
        return (self.tmp / name).read_text()

    def wait_for_standby(self) -> int:
        """Wait until a process without a role has imported its modules; its id."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            for note in self.tmp.glob("imported-*"):
                pid = int(note.name.partition("-")[2])
                if f" pid={pid}\n" not in self.log:
                    return pid
            assert time.monotonic() < deadline_s, f"no process stands by; log:\n{self.log}"
            select.select([], [], [], 0.01)

    @staticmethod
    def wait_for_end(pid: int, timeout_s: float = DEADLINE_S) -> bool:
        """Whether the process, which need not be a child of ours, ends in time."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([fd], [], [], max(0.0, timeout_s))[0])
        finally:
            os.close(fd)


StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Starts an engine: of fakes that behave as named, or with a model; further arguments are `ServerConfig`'s.

    Lost processes end it, unless `max_restarts` says something else.
    """
    with contextlib.ExitStack() as stack:

        def start(
            behaviors: str = "",
            *,
            model: Path | None = None,
            tp: int = 1,
            an_hour_after: tuple[str, str] | None = None,
            **server: Any,
        ) -> Engine:
            processes = {"model": str(model)} if model else {"behaviors": behaviors, "tp": tp}
            clock = {"an_hour_after": an_hour_after} if an_hour_after else {}
            arguments = {"server": {"max_restarts": 0, **server}, **processes, **clock}
            # Not `tmp_path`: the paths of sockets must be short.
            engine = Engine(Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))), arguments)
            stack.callback(engine.process.communicate)
            stack.callback(engine.process.kill)
            return engine

        yield start
