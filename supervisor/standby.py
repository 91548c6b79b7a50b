"""`Standby`: a scheduler that is started before it has settings, and imports torch until it gets them.

Importing takes longer than all else that a start on a CPU does. `engine serve` therefore starts the scheduler first,
and reads its settings and the model's files meanwhile. While the engine serves, `Recovery` keeps another one for the
next restart. This module imports little, because it is loaded before the command line.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Final, NamedTuple

from ..launch.resolve.nvidia_gpus import DEVICE_ORDER

_ROLE: Final = "scheduler"
_PACKAGE: Final = __package__.rsplit(".", 1)[0]


class StartedModule(NamedTuple):
    """A process, and this process's end of its control channel."""

    process: subprocess.Popen[bytes]
    channel: socket.socket


def start_module(module: str, role: str, *inherited_fds: int) -> StartedModule:
    """Start `python -m module role fd pid` in a process group of its own.

    `fd` is its end of the control channel, `pid` the id of this process. The calling thread must live as long as the
    process, which dies with it.
    """
    ours, theirs = socket.socketpair()
    # The same import path as this process, and with -P no current directory before it: the child imports the package
    # that runs here, installed or not, and no file from the user's working directory.
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, role, str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, **DEVICE_ORDER, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output belongs to the command line
            pass_fds=[theirs.fileno(), *inherited_fds],
            process_group=0,
        )
    return StartedModule(process, ours)


class Standby:
    """At most one such process; a context manager that kills it if nobody took it."""

    def __init__(self, module: str = f"{_PACKAGE}.{_ROLE}") -> None:
        self._module = module
        self._started: StartedModule | None = None

    def start(self) -> None:
        """Start a process if there is none."""
        if self._started is None:
            self._started = start_module(self._module, _ROLE)

    def take(self, module: str) -> StartedModule | None:
        """The process, if it runs this module and lives; the caller owns it."""
        if self._started is None or module != self._module:
            return None
        if self._started.process.poll() is not None:
            self.close()
        started, self._started = self._started, None
        return started

    def close(self) -> None:
        """Kill the process."""
        if self._started is not None:
            process, channel = self._started
            self._started = None
            if process.poll() is None:  # else the kernel may have given its id to another group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            channel.close()

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()
