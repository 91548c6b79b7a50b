"""`run_driver`: runs a driver of Ray in a process of its own, and keeps this process's signals and last word.

A driver whose cluster has lost its head is stuck for a minute and is then ended by Ray without a word, and Ray aborts
if a signal comes while it starts. So signals reach the driver as bytes on a socket, when it asks for them.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

from ...launch.child.child import die_with
from ..signal_queue import SignalQueue

_JOINED: Final = b"j"
_OWN_END: Final = b"e"
_AT_ONCE_S: Final = 5.0
_LOST: Final = (
    "the connection to Ray has ended, and with it the fleet: Ray's head or this machine's raylet is gone; the last "
    "lines of Ray are above"
)


class DriverSocket:
    """The driver's side: its signals, and what the other side must know."""

    def __init__(self, sock: socket.socket, folder: str) -> None:
        """`folder`: for the files of a Ray that is started, and of its processes."""
        self.folder = folder
        self._socket = sock

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._socket.fileno()

    def signals(self) -> list[signal.Signals]:
        """The signals that have come."""
        return [signal.Signals(byte) for byte in self._socket.recv(16)]

    def joined(self) -> None:
        """From now on the driver answers signals itself."""
        self._socket.send(_JOINED)


def run_driver(drive: Callable[[DriverSocket], int], patience_s: float) -> tuple[int, str]:
    """Run `drive` in a forked process, which leads a process group and ends with this process.

    Returns in both processes: in the new one with the result of `drive`, or raises its error, and the caller ends it as
    it would end without a fork; then in this one.

    Args:
        drive: returns within `patience_s` of a first signal, and at once after a second one.

    Returns:
        Exit code, and a message that was not shown yet; "" for none.
    """
    folder, parent = tempfile.mkdtemp(prefix="engine-ray-"), os.getpid()
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(SignalQueue())  # before the fork: a signal may come at once
        pid = os.fork()
        if pid == 0:
            stack.pop_all()
            ours.close()
            return _drive(drive, parent, theirs, folder)
        os.setpgid(pid, pid)  # in both processes: a signal may come before the new one has run
        theirs.close()
        with ours:
            said, code, message = _watch(pid, ours, signals, patience_s)
    # Else processes of the driver may be left, and need their files.
    if _JOINED not in said or _OWN_END in said:
        shutil.rmtree(folder, ignore_errors=True)
    return code, message


def _drive(
    drive: Callable[[DriverSocket], int], parent: int, sock: socket.socket, folder: str
) -> tuple[int, str]:
    """The new process."""
    os.setpgid(0, 0)
    die_with(parent)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Unlike SIG_IGN, a handler is not inherited by Ray's processes.
        signal.signal(signum, lambda _signum, _frame: None)
    try:
        return drive(DriverSocket(sock, folder)), ""
    finally:
        sock.send(_OWN_END)
        sock.detach()  # open until the process has ended: the other side answers signals until then


def _watch(pid: int, sock: socket.socket, signals: SignalQueue, patience_s: float) -> tuple[bytes, int, str]:
    """The bytes from the driver, its exit code, and a message."""
    said, passed_on, deadline_s = b"", 0, float("inf")
    while True:
        left_s = None if deadline_s == float("inf") else max(0.0, deadline_s - time.monotonic())
        readable, _, _ = select.select([sock.fileno(), signals.fileno()], [], [], left_s)
        if sock.fileno() in readable:
            with contextlib.suppress(ConnectionResetError):
                if data := sock.recv(16):
                    said += data
                    continue
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            code = _kill(pid)
            return (said, code, "") if _OWN_END in said else (said, 1, _LOST)
        signals.clear_wakeup()
        for signum in signals.received[passed_on:]:
            passed_on += 1
            now_s = time.monotonic()
            deadline_s = now_s + patience_s if passed_on == 1 else min(deadline_s, now_s + _AT_ONCE_S)
            with contextlib.suppress(OSError):
                sock.send(bytes([signum]))
        if passed_on and (_JOINED not in said or time.monotonic() >= deadline_s):
            _kill(pid)
            signum = signals.received[-1]
            return said, 128 + signum, f"stopped at once by {signum.name}; Ray did not answer"


def _kill(pid: int) -> int:
    """Kill a driver, if it still runs, and a Ray that it started; its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
