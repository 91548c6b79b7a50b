"""CPU time and memory of process trees, read from /proc."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Snapshot(NamedTuple):
    """Seconds of CPU at one moment: of all cores, and of one process tree with this process and its children."""

    at_s: float
    busy_s: float
    ours_s: float

    @classmethod
    def take(cls, server_pid: int | None) -> Snapshot:
        """Read the CPU times. A client is a child of this process, and is waited for before the second reading."""
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        ours = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        if server_pid is not None:
            ours += sum(map(cpu_seconds, tree(server_pid)))
        return cls(time.monotonic(), busy_seconds((PROC / "stat").read_text()), ours)

    def others_until(self, later: Snapshot) -> float:
        """CPU cores that all other processes, idle servers included, used between two readings."""
        others_s = (later.busy_s - self.busy_s) - (later.ours_s - self.ours_s)
        return max(0.0, others_s) / max(later.at_s - self.at_s, 1e-9)


def busy_seconds(stat: str) -> float:
    """Busy time of all cores in /proc/stat. User time includes guests; idle, iowait and stolen time are not busy."""
    user, nice, system, _, _, irq, softirq = (int(field) for field in stat.split(None, 8)[1:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def tree(root_pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, left = [], [root_pid]
    while left:
        pid = left.pop()
        found.append(pid)
        left.extend(children.get(pid, ()))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of one process so far; 0 if it has ended."""
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


def resident_bytes(root_pid: int) -> int:
    """Memory of a process tree; a page that several processes share counts once."""
    return sum(_proportional_bytes(pid) for pid in tree(root_pid))


def peak_bytes(root_pid: int) -> int:
    """Peak memory of the largest process of a tree."""
    statuses = [(PROC / str(pid) / "status").read_text() for pid in tree(root_pid)]
    return max(int(status.partition("VmHWM:")[2].split()[0]) << 10 for status in statuses)


def process_name(pid: int) -> str:
    """The command line of a process, shortened."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    return command.strip()[:60]


def _proportional_bytes(pid: int) -> int:
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0  # it has just ended
    return int(rollup.partition("\nPss:")[2].split()[0]) << 10


def _parents() -> Iterator[tuple[int, int]]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            yield int(entry.name), int(fields[1])


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may contain spaces. Empty if it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
