"""How the threads of a CPU kernel wait for each other: they spin for a few microseconds, then sleep.

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

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Final

SPIN_COUNT: Final = 1500  # turns of libgomp's loop, some 10 ns each
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
