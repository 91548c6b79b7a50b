"""`tree_bytes`: the host memory of a process and all processes that it has started."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Final

_PSS: Final = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def tree_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Proportional set size (PSS) of the tree in bytes; 0 for what this user may not read."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir(proc):
        if name.isdigit() and (stat := _read(proc / name / "stat")):
            # The name in parentheses may contain anything; the parent is the second field after it.
            children[int(stat.rpartition(")")[2].split()[1])].append(int(name))
    total, pending = 0, [pid]
    while pending:
        process = pending.pop()
        pending += children[process]
        match = _PSS.search(_read(proc / str(process) / "smaps_rollup"))
        total += int(match[1]) * 1024 if match else 0
    return total


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""
