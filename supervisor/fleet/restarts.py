"""`Restarts`: when a process that has failed is started again, and when it is given up."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 300.0
_FIRST_DELAY_S: Final = 1.0
_LONGEST_DELAY_S: Final = 60.0


class Restarts:
    """The failures of one process in the last five minutes: each doubles the pause before the next start."""

    def __init__(self, max_restarts: int) -> None:
        """Allow so many restarts within five minutes."""
        self._max_restarts = max_restarts
        self._failed_s: deque[float] = deque()

    @property
    def count(self) -> int:
        """Failures within five minutes before the last one, which counts."""
        return len(self._failed_s)

    def failed(self, now_s: float) -> float | None:
        """Count a failure; seconds until the next start, or None: it has failed too often."""
        while self._failed_s and now_s - self._failed_s[0] > WINDOW_S:
            self._failed_s.popleft()
        self._failed_s.append(now_s)
        if self.count > self._max_restarts:
            return None
        return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (self.count - 1))
