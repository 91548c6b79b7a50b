"""`Fleet`: keeps as many servers running as there should be. It starts them, heals, scales and drains them.

It never waits: `poll` is one pass over all replicas, with the time as an argument. So the tests run it in virtual time.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...runtime.config.setting_declaration import check_at_least
from ...runtime.errors import ConfigError, RequestError
from ...runtime.text import counted
from ..child_watch import STOP_GRACE_S
from .server import Server

logger = logging.getLogger(__name__)

MAX_REPLICAS: Final = 512
END_GRACE_S: Final = 2 * STOP_GRACE_S + 4.0
"""From the end of a server's drain to SIGKILL: it ends its own processes meanwhile."""
UNLISTED_S: Final = 2.0
"""From leaving the worker list to SIGTERM: the router reads the list and finds servers that are new in it meanwhile."""
WINDOW_S: Final = 300.0
_LONGEST_DELAY_S: Final = 60.0
_USER: Final = 2


class ListedWorker(msgspec.Struct, frozen=True):
    """One server; `id` is another one for each process, also at the same address."""

    id: str
    url: str
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    model_id: str | None = None


class WorkerList:
    """The file with the servers that serve, for smg's file discovery; it begins and ends with an empty list.

    smg reads the file anew when it changes. It refuses the whole file for an unknown field, and takes the same `id` for
    the same process. A file appears complete under its name, since it is renamed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[ListedWorker] | None = None

    def __enter__(self) -> WorkerList:
        self.write([])
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._written = None  # another process may have written
        with contextlib.suppress(ConfigError):
            self.write([])

    def write(self, workers: list[ListedWorker]) -> None:
        """Replace the file, if the list is another one.

        Raises:
            ConfigError: it cannot be written.
        """
        if workers == self._written:
            return
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.write_bytes(
                msgspec.json.format(msgspec.json.encode({"version": 1, "workers": workers})) + b"\n"
            )
            os.replace(new, self.path)
        except OSError as error:
            raise ConfigError(
                f"the list of workers cannot be written to {self.path}: {error.strerror}; name another file with "
                "--worker-list"
            ) from None
        self._written = list(workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Settings of a fleet.

    Attributes:
        replicas: at the start.
        max_restarts: of one replica within five minutes; then it is given up.
        drain_s: `--drain-timeout` of the servers.
    """

    replicas: int
    max_restarts: int = 5
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        check_at_least("max_restarts", self.max_restarts, 0)


class Phase(enum.StrEnum):
    """Phase of a replica: STARTING -> READY -> DRAINING -> gone; after a failure BACKOFF -> STARTING, or FAILED."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BACKOFF = "backoff"  # its server has failed and is started again after a pause
    FAILED = "failed"  # it has failed too often


@dataclass(slots=True)
class Replica:
    """One place in a fleet. Only `Fleet` changes it.

    Attributes:
        number: the lowest that was free.
        incarnation: counts the servers of the whole fleet, so that each process has another one.
        server: None in BACKOFF and FAILED.
        since_s: begin of its phase; the end of the pause in BACKOFF.
        drains_s: when its server gets SIGTERM; infinite but for one that has just left the list.
        failed_s: times of its failures, in the five minutes before the last one.
        last_failure: how its last server failed; "" if none has.
    """

    number: int
    incarnation: int = 0
    server: Server | None = None
    phase: Phase = Phase.BACKOFF
    since_s: float = 0.0
    drains_s: float = math.inf
    failed_s: list[float] = field(default_factory=list)
    last_failure: str = ""


class FleetOutcome(NamedTuple):
    """Reason of a fleet's end: an exit code and one line."""

    exit_code: int
    message: str


class Fleet:
    """All replicas.

    Attributes:
        target: how many replicas there should be; 0 when the fleet ends.
        failure: why the fleet cannot go on; None while it can.
    """

    def __init__(
        self, settings: FleetSettings, start: Callable[[int], Server], listing: WorkerList | None
    ) -> None:
        """`start` starts the server of a replica, by its number."""
        self.target = settings.replicas
        self.failure: FleetOutcome | None = None
        self._settings = settings
        self._start_server = start
        self._listing = listing
        self._replicas: list[Replica] = []
        self._num_started = 0
        self._has_served = False
        self._is_list_late = False

    @property
    def replicas(self) -> list[Replica]:
        """All, by number."""
        return sorted(self._replicas, key=lambda each: (each.number, each.incarnation))

    @property
    def num_ready(self) -> int:
        """Replicas that serve."""
        return sum(each.phase is Phase.READY for each in self._replicas)

    @property
    def is_gone(self) -> bool:
        """Whether no process is left."""
        return not self._replicas

    def scale_to(self, replicas: int) -> None:
        """Change how many replicas there should be; those that were given up are tried anew.

        Raises:
            RequestError: the number is out of bounds.
        """
        if not 1 <= replicas <= MAX_REPLICAS:
            raise RequestError(
                f"replicas is {replicas}, but it must lie in [1, {MAX_REPLICAS}]", param="replicas"
            )
        logger.info("scaled from=%d to=%d", self.target, replicas)
        self.target = replicas
        self._replicas = [each for each in self._replicas if each.phase is not Phase.FAILED]

    def stop(self, now_s: float) -> None:
        """Drain all replicas at once; `poll` goes on until the fleet is gone."""
        self.target = 0
        for each in list(self._replicas):
            self._remove(each, now_s)
            if each.server is not None and each.drains_s < math.inf:
                self._drain(each, each.server, now_s)
        self._write_list()

    def kill(self) -> None:
        """End all servers at once."""
        for each in self._replicas:
            if each.server is not None:
                each.server.kill()
        self._replicas.clear()

    def poll(self, now_s: float) -> None:
        """See what has happened, and do what is due."""
        for each in list(self._replicas):
            if each.server is not None:
                each.server.poll()
                self._follow(each, each.server, now_s)
        if self.target:
            self._remove_surplus(now_s)
            self._start_missing(now_s)
            self._check_that_one_is_left()
        self._write_list()

    def _follow(self, each: Replica, server: Server, now_s: float) -> None:
        if server.end is not None:
            self._on_end(each, server, *server.end, now_s)
        elif now_s >= each.drains_s:
            self._drain(each, server, now_s)
        elif each.phase is Phase.DRAINING and now_s - each.since_s >= self._settings.drain_s + END_GRACE_S:
            logger.warning("killing replica=%d: it has not ended after its drain", each.number)
            server.kill()
        elif each.phase is Phase.STARTING and server.status is not None and server.status.is_well:
            self._has_served = True
            each.phase, each.since_s = Phase.READY, now_s
            logger.info("ready replica=%d url=%s where=%s", each.number, server.status.url, server.where)

    def _on_end(self, each: Replica, server: Server, exit_code: int | None, cause: str, now_s: float) -> None:
        server.kill()  # its actor, whose place is free then
        each.server = None
        if each.phase is Phase.DRAINING:
            logger.info("gone replica=%d cause=%s", each.number, cause)
            self._replicas.remove(each)
            return
        if exit_code == _USER and not self._has_served:
            self.failure = self.failure or FleetOutcome(_USER, f"replica {each.number} {cause}")
        each.last_failure = cause
        each.failed_s = [*(then_s for then_s in each.failed_s if now_s - then_s <= WINDOW_S), now_s]
        count, limit = len(each.failed_s), self._settings.max_restarts
        if count > limit:
            each.phase = Phase.FAILED
            logger.error(
                "gave up replica=%d failures=%d: it %s; POST /scale tries it anew", each.number, count, cause
            )
            return
        delay_s = min(_LONGEST_DELAY_S, 2.0 ** (count - 1))
        each.phase, each.since_s = Phase.BACKOFF, now_s + delay_s
        logger.error(
            "lost replica=%d: it %s; starting it again in %g s (failure %d in %g s, the limit is %d)",
            *(each.number, cause, delay_s, count, WINDOW_S, limit),
        )

    def _wanted(self) -> list[Replica]:
        return [each for each in self._replicas if each.phase is not Phase.DRAINING]

    def _remove_surplus(self, now_s: float) -> None:
        """Remove those first that do not serve, then the highest number."""
        order = [Phase.FAILED, Phase.BACKOFF, Phase.STARTING, Phase.READY]
        wanted = sorted(self._wanted(), key=lambda each: (order.index(each.phase), -each.number))
        for each in wanted[: max(0, len(wanted) - self.target)]:
            self._remove(each, now_s)

    def _remove(self, each: Replica, now_s: float) -> None:
        if each.server is None:
            self._replicas.remove(each)
        elif each.phase is not Phase.DRAINING:
            is_listed = self._listing is not None and each.phase is Phase.READY
            each.phase, each.since_s, each.drains_s = Phase.DRAINING, now_s, now_s + UNLISTED_S
            if not is_listed:
                self._drain(each, each.server, now_s)

    def _drain(self, each: Replica, server: Server, now_s: float) -> None:
        each.since_s, each.drains_s = now_s, math.inf
        server.drain()
        logger.info("draining replica=%d timeout_s=%g", each.number, self._settings.drain_s)

    def _start_missing(self, now_s: float) -> None:
        while len(self._wanted()) < self.target:
            taken = {each.number for each in self._replicas}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            self._replicas.append(Replica(number))
        for each in self._replicas:
            if each.phase is Phase.BACKOFF and now_s >= each.since_s:
                self._num_started += 1
                each.incarnation, each.server = self._num_started, self._start_server(each.number)
                each.phase, each.since_s = Phase.STARTING, now_s
                logger.info("starting replica=%d", each.number)

    def _check_that_one_is_left(self) -> None:
        wanted = self._wanted()
        if all(each.phase is Phase.FAILED for each in wanted):
            last = wanted[-1]
            self.failure = self.failure or FleetOutcome(
                1,
                f"all replicas were given up: replica {last.number} failed {counted(len(last.failed_s), 'time')} "
                f"within {WINDOW_S:g} s and at last {last.last_failure}",
            )

    def _write_list(self) -> None:
        if self._listing is None:
            return
        workers = [
            ListedWorker(
                f"{each.number}-{each.incarnation}", each.server.status.url, model_id=each.server.status.model
            )
            for each in self.replicas
            if each.phase is Phase.READY and each.server and each.server.status and each.server.status.url
        ]
        try:
            self._listing.write(workers)
            self._is_list_late = False
        except ConfigError as error:
            # A full disk is no reason to end servers; it is tried again in each pass.
            if not self._is_list_late:
                logger.error("%s", error)
            self._is_list_late = True
