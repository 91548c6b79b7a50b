"""`ProcessIdentity`: names a process on this machine, so that another one here can see whether it still exists.

A dead process writes nothing. For a process of another machine, or in another container, that cannot be seen.
"""

from __future__ import annotations

import os
from pathlib import Path

from .message_base import Record


class ProcessIdentity(Record, frozen=True):
    """Which process, and where.

    Attributes:
        place: the machine since its start, and the namespace of its process ids.
        pid: in that namespace.
        start: when it was started, in the kernel's ticks: another process may get its pid later.
    """

    place: str
    pid: int
    start: str

    def is_dead(self) -> bool:
        """Whether it is certain that the process has ended."""
        return self.place == _place() and _start_of(self.pid) != self.start


def own_identity() -> ProcessIdentity:
    """Of this process."""
    pid = os.getpid()
    return ProcessIdentity(_place(), pid, _start_of(pid))


def _place() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"


def _start_of(pid: int) -> str:
    """Field 22 of `/proc/PID/stat`; "" for a process that has ended, also if its parent has not noticed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
