"""`Replica`: one place in a fleet: its server, the phase that it is in, and what is known about it."""

from __future__ import annotations

import enum

from .restarts import Restarts
from .scaling import Load
from .server import Server


class Phase(enum.StrEnum):
    """What a replica does.

    STARTING -> READY -> LEAVING -> DRAINING -> gone
        |         |
        +-> BACKOFF -> STARTING, or FAILED
    """

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # not in the list any more; requests that were sent to it before may still arrive
    DRAINING = "draining"
    BACKOFF = "backoff"  # its server has failed and is started again after a pause
    FAILED = "failed"  # it has failed too often


class Replica:
    """One replica. Only `Fleet` changes it.

    Attributes:
        number: the lowest that was free.
        phase: what it does, since `since_s`.
        server: the process; None in BACKOFF and FAILED.
        incarnation: counts the servers of the whole fleet, so that each process has another one.
        load: its last report; None before the first one.
        answered_s: when it last answered at all.
        last_failure: how its last server failed; "" if none has.
        next_start_s: the end of BACKOFF.
    """

    def __init__(self, number: int, max_restarts: int) -> None:
        self.number = number
        self.phase = Phase.BACKOFF
        self.since_s = 0.0
        self.server: Server | None = None
        self.incarnation = 0
        self.load: Load | None = None
        self.answered_s = 0.0
        self.restarts = Restarts(max_restarts)
        self.last_failure = ""
        self.next_start_s = 0.0

    @property
    def name(self) -> str:
        """For messages."""
        return f"replica {self.number}"

    @property
    def is_wanted(self) -> bool:
        """Whether it counts as one of the replicas that there should be."""
        return self.phase not in (Phase.LEAVING, Phase.DRAINING)

    @property
    def is_pending(self) -> bool:
        """Whether it is on its way to READY."""
        return self.phase in (Phase.STARTING, Phase.BACKOFF)
