"""`OrphanReaper`: aborts again what the scheduler still runs although the request has ended here.

An abort is a message like any other. If one is lost, the request runs until its last token without a reader. It shows
by its rows: they go on arriving under an id that is not in the request log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..runtime.messages import AbortRequest, SchedulerInput, TextOutput

_GRACE_S: Final = 2.0  # rows of an aborted request arrive for a step or two
_MAX_ORPHANS: Final = 65_536


class OrphanReaper:
    """Watches the rows of requests that are not in the log."""

    def __init__(self, send: Callable[[SchedulerInput], None]) -> None:
        """Send aborts to the scheduler through `send`."""
        self._send = send
        self._since_s: dict[
            str, float
        ] = {}  # orphan's id -> time of its first row here, or of its last abort

    @property
    def num_orphans(self) -> int:
        """Orphans with rows so far and no finished row."""
        return len(self._since_s)

    def row(self, output: TextOutput, now_s: float) -> None:
        """Take a row of a request that is not in the log; abort it if its rows go on for longer than the grace time."""
        if output.finish is not None:
            self._since_s.pop(output.rid, None)
            return
        if len(self._since_s) >= _MAX_ORPHANS:
            self._since_s.clear()  # those that still run are added again with their next row
        if now_s - self._since_s.setdefault(output.rid, now_s) > _GRACE_S:
            self._since_s[output.rid] = now_s
            self._send(AbortRequest(rid=output.rid, reason="orphan: not in the request log"))
