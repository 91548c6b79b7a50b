"""How the threads of a CPU kernel wait for each other: asleep, not spinning.

By default GNU OpenMP, which torch uses, lets a thread that waits spin for about a millisecond. As soon as a third
process wants a core (our own HTTP server is one), a spinning thread burns the time slice that the thread it waits for
needs, once per kernel: on two cores with a load of 5, a decode step of SmolLM2-135M takes 240-630 ms with spinning and
15 ms with sleeping.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Final

_USER_KNOWS_BETTER: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def let_waiting_threads_sleep(environ: MutableMapping[str, str] | None = None) -> bool:
    """Set OpenMP's wait policy for this process; returns whether it took effect.

    It has to be called before torch is imported: the runtime reads its environment once, when it is loaded. A policy
    that the user has set stays.
    """
    environ = os.environ if environ is None else environ
    if "torch" in sys.modules or any(name in environ for name in _USER_KNOWS_BETTER):
        return False
    environ["OMP_WAIT_POLICY"] = "passive"
    return True
