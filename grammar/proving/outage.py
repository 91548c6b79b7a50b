"""`Outage`: a time in which no new grammar is compiled, because the processes for it are lost or do not start.

Without it, each request with a new grammar would start a process that fails too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_LOST: Final = 3
LOST_WINDOW_S: Final = 60.0
UNAVAILABLE_S: Final = 60.0
"""How long all new grammars get 503, after `MAX_LOST` workers were lost with different grammars in `LOST_WINDOW_S`."""
START_FAILED_S: Final = 10.0
"""The same, after a worker that did not start."""


class Outage:
    """Knows until when new grammars are refused. Known ones are not affected."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Refuse nothing yet; `clock`: seconds."""
        self._clock = clock
        self._lost: OrderedDict[str, float] = OrderedDict()  # keys of grammars that lost a worker, and when
        self._until_s = -1.0
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why new grammars are refused now; "" if they are not."""
        return self._reason if self._clock() < self._until_s else ""

    def start_failed(self, error: Exception) -> None:
        """A worker did not start: refuse new grammars for a while."""
        self._begin(f"the process that compiles grammars has not started: {error}", START_FAILED_S)

    def worker_lost(self, key: str) -> bool:
        """A worker was lost with the grammar of this key; whether that was one too many."""
        now_s = self._clock()
        self._lost[key] = now_s
        self._lost.move_to_end(key)
        while next(iter(self._lost.values())) < now_s - LOST_WINDOW_S:
            self._lost.popitem(last=False)
        if len(self._lost) < MAX_LOST:
            return False
        self._lost.clear()
        self._begin(
            f"the process that compiles grammars was lost {MAX_LOST} times within {LOST_WINDOW_S:.0f} s",
            UNAVAILABLE_S,
        )
        return True

    def _begin(self, reason: str, duration_s: float) -> None:
        self._until_s = self._clock() + duration_s
        self._reason = reason
