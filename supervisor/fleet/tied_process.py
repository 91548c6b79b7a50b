"""`TiedProcess`: a process that gets SIGTERM when its parent ends in any way, so that nothing outlives a killed fleet.

This module is also the program that the parent starts: it asks the kernel for the signal and becomes the command. The
request outlives `exec` (Linux), so the command need not know of it; a server then drains as always.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_MEMORY_HINT: Final = " (by another process, or by the kernel because memory ran out)"


class TiedProcess:
    """A started command, in a process group of its own: Ctrl-C on a terminal reaches only the fleet, which drains.

    The thread that starts it must live as long as the process.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, is_silent: bool) -> None:
        """Start it.

        Args:
            command: its program first.
            env: in addition to the environment of this process.
            is_silent: drop its standard output, instead of sending it to standard error.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid()), *command],
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if is_silent else 2,
            process_group=0,
        )
        self._is_killed = False
        self._group_is_gone = False

    @property
    def pid(self) -> int:
        """Its process id, before and after it has become the command."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Its group is killed with it."""
        code = self._process.poll()
        if code is not None:
            self._kill_group()
        return code

    def describe_end(self) -> str:
        """How it ended: `was killed by SIGKILL`."""
        code = self._process.returncode
        if code is None:
            return "runs"
        if code == 0:
            return "ended"
        if code > 0:
            return f"exited with code {code}; its last lines above say why"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if self._is_killed:
            return "was killed, because it did not end in time"
        return f"was killed by {name}{_MEMORY_HINT if -code == signal.SIGKILL else ''}"

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill it and its group, and wait for its end."""
        if self._process.poll() is None:
            self._is_killed = True
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        """Kill the process group; once, before the kernel may reuse its id."""
        if not self._group_is_gone:
            self._group_is_gone = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def main() -> None:
    """Become the command: `PARENT_PID PROGRAM ARGUMENT...`."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it ended before the call above
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
