"""`ChildProcess`: the supervisor's side of one child: start it, exchange messages, describe its end, kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from ..launch.child.control import (
    ForAll,
    PeerDied,
    Ready,
    Role,
    Stop,
    ToSupervisor,
    process_label,
    supervisor_end,
)
from ..launch.child.crash_report import SHOW_STACKS, read_fatal_stacks
from ..runtime.transport.message_base import Message
from .standby import StartedModule, start_module

_EXIT_AFTER_EOF_S: Final = 2.0
_TRACEBACKS_S: Final = 1.0


class ChildProcess:
    """One started child.

    The child leads a process group of its own. A terminal's Ctrl-C then reaches only the supervisor, which decides
    about order and drain; and processes that the child starts (a compiler) can be killed with it as one group, without
    affecting the group of the shell or script that runs the supervisor.

    Attributes:
        role, rank, replica: which process it is.
        name: for messages: `scheduler`, `model_runner of rank 1`, `scheduler of replica 1`.
        label: for logs, one word.
        ready: its `Ready` message; None before.
        stopping: it was asked to end, so its end is not a failure.
        lost_others: its message when it lost the other ranks of its group; "" if it has not.
        traceback: of the error that ended it, if it could report one.
        silent_s: seconds without a frame from it, as the supervisor's watchdog counts them.
    """

    def __init__(
        self,
        role: Role,
        module: str,
        rank: int = 0,
        black_box: str = "",
        replica: int | None = None,
        listener_fd: int | None = None,
        started: StartedModule | None = None,
    ) -> None:
        """Start `python -m module`. The calling thread must live as long as the child, which dies with it.

        Args:
            black_box: the folder for its stacks, see `black_box`; "" for none.
            replica: its replica's number; None if there is one replica, or if it is the tokenizer manager.
            listener_fd: the listening socket that it inherits.
            started: the process, if it runs already.
        """
        if started is None:
            started = start_module(module, role.value, *(() if listener_fd is None else (listener_fd,)))
        self._process = started.process
        self.role, self.rank, self.replica = role, rank, replica or 0
        self.name = f"{role} of rank {rank}" if role is Role.MODEL_RUNNER else role.value
        if replica is not None:
            self.name += f" of replica {replica}"
        self.label = process_label(role, rank, replica)
        self.ready: Ready | None = None
        self.stopping = False
        self.lost_others = ""
        self.traceback = ""
        self.silent_s = 0.0
        self._channel = supervisor_end(started.channel)
        self._black_box = black_box
        self._is_deaf = False
        self._is_aborted = False
        self._is_killed = False  # by `abort` or `kill`, while it was alive
        self._group_is_gone = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when the child has sent a message or died."""
        return self._channel.fileno()

    @property
    def closed(self) -> bool:
        """Whether the child has closed its end of the channel, as the kernel does when it dies."""
        return self._channel.closed

    def send(self, message: Message) -> None:
        """Send the child a message; lost if the child is dead or stuck, which `has_ended` or the watchdog show."""
        self._channel.send(message)

    def pass_on(self, order: ForAll) -> None:
        """Send an order for all processes; it is lost if the child is stuck, so that it cannot delay the others."""
        self._channel.send_if_room(order)

    def request_stop(self, message: Stop | PeerDied) -> None:
        """Ask the child to end; from now on an exit with code 0 is not a failure."""
        self.stopping = True
        self._channel.send(message)

    def receive(self) -> list[ToSupervisor]:
        """The child's messages since the last call; resets `silent_s` if there are any."""
        messages = self._channel.receive()
        if messages:
            self.silent_s = 0.0
        return messages

    def has_ended(self) -> bool:
        """Whether the process has ended, or has closed its channel without having been asked to stop.

        Does not block for longer than a dying process needs.
        """
        if self._channel.closed and not self._is_deaf and self.exit_code is None:
            # The kernel closes the channel shortly before the exit status is available.
            try:
                self._process.wait(_EXIT_AFTER_EOF_S)
            except subprocess.TimeoutExpired:
                self._is_deaf = not self.stopping
        return self._is_deaf or self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Once it is known, the process group is killed, too."""
        code = self._process.poll()
        if code is not None:
            self._kill_group()
        return code

    def describe_end(self) -> str:
        """End of the process, for the root cause: `scheduler was killed by SIGKILL`."""
        code = self.exit_code
        if code is None:
            return f"{self.name} closed its control channel and lives on; it is killed"
        if code >= 0:
            return f"{self.name} exited with code {code} without giving a reason; its last lines are above"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if -code in (signal.SIGABRT, signal.SIGKILL) and self._is_killed:
            return f"{self.name} was killed by the engine, because it did not end"
        hint = (
            " (by another process, or by the kernel because memory ran out)"
            if -code == signal.SIGKILL
            else ""
        )
        return f"{self.name} was killed by {name}{hint}"

    def is_suspended(self) -> bool:
        """Whether the process was stopped by a signal, so that none of its threads runs (Linux; else unknown)."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state == "T"  # "t": stopped by a debugger

    def abort(self) -> None:
        """Make the process print the tracebacks of all its threads (faulthandler) and end."""
        self._is_aborted = not self.is_suspended()  # a suspended process cannot print any
        self._is_killed = self._is_killed or self._process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)

    def show_stacks(self) -> None:
        """Have it write the stacks of its threads into the black box and continue. No effect before it is ready."""
        if self._black_box and self.ready is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(SHOW_STACKS)

    def kill(self) -> None:
        """Kill the process and all it has started, and collect its exit status. After `abort` it may print its stacks.

        The stacks that it wrote on a fatal signal are copied to standard error.
        """
        if self._is_aborted:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TRACEBACKS_S)
        self._is_killed = self._is_killed or self._process.poll() is None
        self._kill_group()
        self._process.wait()
        self._channel.close()
        if self._black_box and (stacks := read_fatal_stacks(Path(self._black_box), self.label)):
            sys.stderr.write(stacks)
            sys.stderr.flush()

    def _kill_group(self) -> None:
        """Kill the process group; once, before the kernel may reuse its id."""
        if not self._group_is_gone:
            self._group_is_gone = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
