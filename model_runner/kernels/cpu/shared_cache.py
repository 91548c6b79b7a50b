"""`shared_cache_bytes`: the size of the last cache that all CPUs of this process share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CPUS: Final = Path("/sys/devices/system/cpu")
_LAST_LEVEL: Final = 3
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20}


def shared_cache_bytes(root: Path = _CPUS, cpus: frozenset[int] | None = None) -> int:
    """Of the third level, as Linux describes it; 0 where it does not, and where several such caches serve the CPUs.

    What one core reads from memory another one finds there. A server's CPU may have a dozen, each for some cores.

    Args:
        root: where Linux describes the CPUs.
        cpus: those that may be used; None: of this process.
    """
    wanted = os.sched_getaffinity(0) if cpus is None else cpus
    try:
        for cache in sorted((root / f"cpu{min(wanted)}" / "cache").glob("index*")):
            if int((cache / "level").read_text()) == _LAST_LEVEL:
                shared = _cpus_of((cache / "shared_cpu_list").read_text())
                return _bytes_of((cache / "size").read_text()) if shared.issuperset(wanted) else 0
    except (OSError, ValueError):
        pass  # a description we do not know is none
    return 0


def _cpus_of(text: str) -> frozenset[int]:
    """`0-3,8` to the numbers."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _bytes_of(text: str) -> int:
    """`32768K` to the number."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    if unit not in _UNITS:
        raise ValueError(text)
    return int(number) * _UNITS[unit]
