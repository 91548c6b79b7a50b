"""`FleetRouter`: the router in front of a fleet: started when the first server is ready, and again when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from .restarts import Restarts
from .tied_process import TiedProcess

logger = logging.getLogger(__name__)

END_GRACE_S: Final = 10.0  # smg waits 5 s for its last requests, also if there are none


class Router(Protocol):
    """What a fleet does with its router."""

    @property
    def state(self) -> str:
        """`none`, `waiting`, `running`, `failed` or `stopped`."""
        ...

    @property
    def pid(self) -> int | None:
        """Of its process; None while there is none."""
        ...

    @property
    def failure(self) -> str:
        """Why there is no router any more; "" while there may be one."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        ...

    def look(self, now_s: float) -> None:
        """Start it, or start it again, when that is due."""
        ...

    def stop(self) -> None:
        """Have it end its open streams, and end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class NoRouter:
    """Clients, or a router of their own, ask the servers."""

    state = "none"
    pid = None
    failure = ""
    is_gone = True

    def look(self, now_s: float) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""


class FleetRouter:
    """A router that reads the list of workers itself.

    Attributes:
        failure: see `Router`.
    """

    def __init__(self, command: Callable[[], list[str] | None], max_restarts: int) -> None:
        """Not yet started.

        Args:
            command: its command line; None as long as it is too early for it.
            max_restarts: within five minutes.
        """
        self.failure = ""
        self._command = command
        self._restarts = Restarts(max_restarts)
        self._process: TiedProcess | None = None
        self._next_start_s = 0.0
        self._is_stopped = False

    @property
    def state(self) -> str:
        if self.failure:
            return "failed"
        if self._is_stopped:
            return "stopped"
        return "waiting" if self._process is None else "running"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_gone(self) -> bool:
        return self._process is None or self._process.exit_code is not None

    def look(self, now_s: float) -> None:
        if self._is_stopped or self.failure:
            return
        if self._process is not None and self._process.exit_code is not None:
            self._on_end(self._process.describe_end(), now_s)
        elif self._process is None and now_s >= self._next_start_s:
            command = self._command()
            if command is not None:
                self._process = TiedProcess(command, {}, is_silent=False)
                logger.info("started router pid=%d", self._process.pid)

    def stop(self) -> None:
        self._is_stopped = True
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        self._is_stopped = True
        if self._process is not None:
            self._process.kill()

    def _on_end(self, cause: str, now_s: float) -> None:
        self._process = None
        delay_s = self._restarts.failed(now_s)
        if delay_s is None:
            self.failure = f"the router failed {self._restarts.count} times in a row and at last {cause}"
            return
        self._next_start_s = now_s + delay_s
        logger.error("lost the router: it %s; starting it again in %g s", cause, delay_s)
