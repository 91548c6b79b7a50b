"""`VirtualTimeLoop`: an event loop whose time passes only while all tasks wait, and then at once."""

from __future__ import annotations

import asyncio
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs timers in their order without waiting; for tasks that wait only for each other and for the time.

    The outcome of a test with deadlines then depends on no machine and no load.
    """

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._virtual = selector

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._virtual.now_s


class _Selector(selectors.DefaultSelector):
    """Passes the time that it is asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The files that are ready now. Without any, and without a timer, no task could ever go on."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("all tasks wait for something that cannot come")
        if not ready:
            self.now_s += max(timeout or 0.0, 0.0)
        return ready
