"""Resources that a process takes of its machine: open files, the spinning of its threads, memory."""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
from collections import defaultdict
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

OWN_FILES: Final = 128
"""Files besides connections: sockets between the processes, libraries, logs; about 40 are in use."""


def make_room_for(num_connections: int) -> None:
    """Raise the soft limit on open files to what `num_connections` need, within the hard limit.

    The soft limit is 1024 on most systems for programs that use `select`; the engine does not use it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.warning("open_files=%d of wanted=%d: %s", soft, wanted, error)
        return
    logger.debug("open_files=%d, raised from %d", wanted, soft)


SPIN_COUNT: Final = 1500
"""Turns of libgomp's loop, some 10 ns each, for which a thread of a CPU kernel waits for others before it sleeps.

GNU OpenMP, which torch uses, lets a waiting thread spin for about a millisecond by default. When a third process needs
a core (the engine's own HTTP server is one), a spinning thread uses up the time slice of the thread that it waits for,
once per kernel. Sleeping at once avoids that, but costs a wake-up per kernel. A short spin covers the gaps between
kernels. One decode step of SmolLM2-135M on two cores, in milliseconds:

    spin count       machine quiet    another process on one core
    default          12.0             40-630
    20000            12.9             140-170
    5000             13               63-66
    1500 (chosen)    14               27-30 (at 1000)
    0 (passive)      20-24            16-26
"""
_USER_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def shorten_spinning(environ: MutableMapping[str, str] | None = None) -> bool:
    """Bound how long OpenMP's threads of this process spin; returns whether it took effect.

    Call it before torch is imported: the OpenMP runtime reads its environment once, when it is loaded. A policy that
    the user has set is kept.
    """
    environ = os.environ if environ is None else environ
    if "torch" in sys.modules or any(name in environ for name in _USER_VARIABLES):
        return False
    environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True


_PSS: Final = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def tree_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Host memory (PSS) of a process and all that it has started, in bytes; 0 for what this user may not read."""
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
