"""`Sweep`: finds what nobody ended: requests whose abort was lost, and streams whose client does not read.

An abort is a message like any other, and one that is lost would leave a request running for nobody until its last
token. Its rows give it away: they go on arriving for an id that nobody knows. Rows that wait for a slow client are
bounded in number; its connection is bounded in time (`http/connection.py`), in which a fast model makes many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from ..runtime.errors import RequestError
from ..runtime.messages import AbortRequest, SchedulerInput, TextOutput
from .generation import Generation

_GRACE_S: Final = 2.0  # rows of an aborted request arrive for a step or two
_MAX_STRAYS: Final = 65_536
MAX_WAITING_ROWS: Final = 32_768  # of one stream; some 20 MB


class Sweep:
    """Looks at rows that nobody waits for, and with each report of the scheduler at the streams."""

    def __init__(
        self, send: Callable[[SchedulerInput], None], fail: Callable[[Generation, RequestError, str], None]
    ) -> None:
        """Abort through `send`; end a stream with an error, and a reason for the logs, through `fail`."""
        self._send = send
        self._fail = fail
        self._since_s: dict[str, float] = {}  # id nobody knows -> when it was first seen, or last aborted

    def stray(self, output: TextOutput, now_s: float) -> None:
        """A row has come for a request that nobody knows: abort it again if they do not end."""
        if output.finish is not None:
            self._since_s.pop(output.rid, None)
            return
        if len(self._since_s) >= _MAX_STRAYS:
            self._since_s.clear()  # those that go on are back with their next row
        if now_s - self._since_s.setdefault(output.rid, now_s) > _GRACE_S:
            self._since_s[output.rid] = now_s
            self._send(AbortRequest(rid=output.rid, reason="nobody waits for it"))

    def slow_readers(self, generations: Iterable[Generation]) -> None:
        """End the streams for which too much waits."""
        for generation in [one for one in generations if one.num_waiting_rows > MAX_WAITING_ROWS]:
            error = RequestError(
                f"{generation.num_waiting_rows} events waited for the client to read them, the limit is "
                f"{MAX_WAITING_ROWS}; read faster, or ask for less at once",
                code="client_too_slow",
                status=408,
            )
            self._fail(generation, error, "its client does not read")
