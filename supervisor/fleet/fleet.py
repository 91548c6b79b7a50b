"""`Fleet`: keeps as many servers running as there should be. It starts them, heals, scales and drains them.

It does no I/O of its own and never waits: `look` is one pass over all replicas, with the time as an argument; what
servers answered over HTTP comes in through `answered`, by `FleetProbe`. So the tests run it in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from ...runtime.config.setting_declaration import check_at_least, check_finite
from ...runtime.counted import counted
from ...runtime.errors import ConfigError, RequestError
from ..child_watch import STOP_GRACE_S
from .replica import Phase, Replica
from .restarts import WINDOW_S
from .scaling import MAX_REPLICAS, Load, ScaleBounds, ScalePolicy
from .server import ServerEnd, Servers
from .worker_list import ListedWorker

logger = logging.getLogger(__name__)

LEAVE_S: Final = 2.0
"""From the removal of a server from the list to its SIGTERM: the router reads the list at least every second."""
END_GRACE_S: Final = 2 * STOP_GRACE_S + 4.0
"""From the end of a server's drain to SIGKILL: it ends its own processes meanwhile."""
_USER: Final = 2


class Listing(Protocol):
    """Takes the list of workers."""

    def write(self, workers: list[ListedWorker]) -> None:
        """The servers that take requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Settings of a fleet.

    Attributes:
        replicas: at the start.
        bounds: of scaling by load.
        max_restarts: of one replica within five minutes; then it is given up.
        silence_s: a server that does not answer at all for so long is killed.
        drain_s: `--drain-timeout` of the servers.
    """

    replicas: int
    bounds: ScaleBounds
    max_restarts: int = 5
    silence_s: float = 60.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        check_at_least("max_restarts", self.max_restarts, 0)
        check_finite("silence", self.silence_s, 0.0, open_end=True)
        low, high = self.bounds.min_replicas, self.bounds.max_replicas
        if not low <= self.replicas <= high:
            raise ConfigError(
                f"--replicas is {self.replicas}, but it must lie in [{low}, {high}], from --min-replicas to "
                "--max-replicas"
            )


class Ask(NamedTuple):
    """A server to ask: `incarnation` says which, also after it has been replaced."""

    incarnation: int
    url: str


class FleetOutcome(NamedTuple):
    """Why a fleet ends: an exit code and one line."""

    exit_code: int
    message: str


class Fleet:
    """All replicas.

    Attributes:
        target: how many replicas there should be; 0 when the fleet ends.
        failure: why the fleet cannot go on; None while it can.
    """

    def __init__(self, settings: FleetSettings, servers: Servers, listing: Listing) -> None:
        self.target = settings.replicas
        self.failure: FleetOutcome | None = None
        self._settings = settings
        self._servers = servers
        self._listing = listing
        self._policy = ScalePolicy(settings.bounds)
        self._replicas: list[Replica] = []
        self._num_started = 0
        self._has_served = False
        self._is_list_late = False

    # ------------------------------------------------------------ what others ask of it

    @property
    def replicas(self) -> list[Replica]:
        """All, by number; those that leave come twice if a new one has taken the number."""
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
        bounds, places = self._settings.bounds, self._servers.num_places
        low, high = (1, MAX_REPLICAS) if bounds.is_fixed else (bounds.min_replicas, bounds.max_replicas)
        why = "" if bounds.is_fixed else ", from --min-replicas to --max-replicas"
        if places is not None and places < high:
            high, why = places, ", the devices of this machine"
        if not low <= replicas <= high:
            raise RequestError(
                f"replicas is {replicas}, but it must lie in [{low}, {high}]{why}", param="replicas"
            )
        logger.info("scaled from=%d to=%d cause=request", self.target, replicas)
        self.target = replicas
        self._policy.reset()
        self._replicas = [each for each in self._replicas if each.phase is not Phase.FAILED]

    def to_ask(self) -> list[Ask]:
        """The servers that listen, and are not told to end."""
        return [
            Ask(each.incarnation, each.server.url)
            for each in self._replicas
            if each.server is not None and each.is_wanted and each.server.url is not None
        ]

    def answered(self, ask: Ask, now_s: float, *, is_well: bool, load: Load | None) -> None:
        """A server has answered.

        Args:
            ask: from `to_ask`; without effect if the server has been replaced since.
            now_s: when.
            is_well: its `/health` is 200.
            load: its report, if it has given one.
        """
        for each in self._replicas:
            if each.incarnation != ask.incarnation or each.server is None:
                continue
            each.answered_s = now_s
            each.load = load or each.load
            if is_well and each.phase is Phase.STARTING:
                self._has_served = True
                self._enter(each, Phase.READY, now_s)
                logger.info("ready replica=%d url=%s where=%s", each.number, ask.url, each.server.where)

    def stop(self, now_s: float) -> None:
        """Drain all replicas at once; `look` goes on until the fleet is gone."""
        self.target = 0
        for each in list(self._replicas):
            if each.server is None:
                self._replicas.remove(each)
            elif each.phase is not Phase.DRAINING:
                self._drain(each, now_s)
        self._write_list()

    def kill(self) -> None:
        """End all servers at once."""
        for each in self._replicas:
            if each.server is not None:
                each.server.kill()
        self._replicas.clear()

    # ------------------------------------------------------------ one pass

    def look(self, now_s: float) -> None:
        """See what has ended, and do what is due."""
        if gone := self._servers.look():
            self.failure = self.failure or FleetOutcome(1, gone)
            self._replicas.clear()  # out of reach; they drain by themselves
            self.target = 0
        for each in list(self._replicas):
            self._look_at(each, now_s)
        if self.target:
            self._scale_by_load(now_s)
            self._remove_surplus(now_s)
            self._start_missing(now_s)
            self._check_that_one_is_left()
        self._write_list()

    def _look_at(self, each: Replica, now_s: float) -> None:
        server, settings = each.server, self._settings
        if server is None:
            return
        if (end := server.end) is not None:
            self._on_end(each, end, now_s)
        elif each.phase is Phase.LEAVING and now_s - each.since_s >= LEAVE_S:
            self._drain(each, now_s)
        elif each.phase is Phase.DRAINING and now_s - each.since_s >= settings.drain_s + END_GRACE_S:
            logger.warning("killing replica=%d: it has not ended after its drain", each.number)
            server.kill()
            self._enter(each, Phase.DRAINING, now_s)  # where its machine does not answer, again later
        elif each.phase is Phase.READY and now_s - max(each.answered_s, each.since_s) >= settings.silence_s:
            logger.error("killing replica=%d: no answer for %g s", each.number, settings.silence_s)
            server.kill()
            self._fail(each, f"did not answer for {settings.silence_s:g} s and was killed", now_s)

    def _on_end(self, each: Replica, end: ServerEnd, now_s: float) -> None:
        if not each.is_wanted:
            logger.info("gone replica=%d cause=%s", each.number, end.cause)
            self._replicas.remove(each)
            return
        if end.exit_code == _USER and not self._has_served:
            self.failure = self.failure or FleetOutcome(_USER, f"{each.name} {end.cause}")
        self._fail(each, end.cause, now_s)

    def _fail(self, each: Replica, cause: str, now_s: float) -> None:
        """Plan the next start, or give the replica up."""
        each.server = None
        each.load = None
        each.last_failure = cause
        delay_s = each.restarts.failed(now_s)
        if delay_s is None:
            self._enter(each, Phase.FAILED, now_s)
            logger.error(
                "gave up replica=%d failures=%d: it %s; POST /scale tries it anew",
                each.number,
                each.restarts.count,
                cause,
            )
            return
        self._enter(each, Phase.BACKOFF, now_s)
        each.next_start_s = now_s + delay_s
        logger.error(
            "lost replica=%d: it %s; starting it again in %g s (failure %d in %g s, the limit is %d)",
            each.number,
            cause,
            delay_s,
            each.restarts.count,
            WINDOW_S,
            self._settings.max_restarts,
        )

    def _scale_by_load(self, now_s: float) -> None:
        loads = [each.load for each in self._replicas if each.phase is Phase.READY and each.load is not None]
        num_pending = sum(each.is_pending for each in self._replicas)
        wanted = self._policy.target(now_s, self.target, loads, num_pending)
        if wanted != self.target:
            waiting = sum(load.queue_tokens for load in loads)
            logger.info("scaled from=%d to=%d cause=load queue_tokens=%d", self.target, wanted, waiting)
            self.target = wanted

    def _remove_surplus(self, now_s: float) -> None:
        """Those that do not serve first, then the highest number."""
        wanted = [each for each in self._replicas if each.is_wanted]
        wanted.sort(key=lambda each: (each.phase is Phase.READY, each.phase is Phase.STARTING, -each.number))
        for each in wanted[: max(0, len(wanted) - self.target)]:
            if each.server is None:
                self._replicas.remove(each)
            elif each.phase is Phase.READY:
                self._enter(each, Phase.LEAVING, now_s)
                logger.info("leaving replica=%d", each.number)
            else:
                self._drain(each, now_s)

    def _start_missing(self, now_s: float) -> None:
        wanted = [each for each in self._replicas if each.is_wanted]
        for each in wanted:
            if each.phase is Phase.BACKOFF and now_s >= each.next_start_s:
                self._start(each, now_s)
        for _ in range(self.target - len(wanted)):
            number = next(self._free_numbers())
            if self._servers.num_places is not None and number >= self._servers.num_places:
                break  # the device of one that drains
            replica = Replica(number, self._settings.max_restarts)
            self._replicas.append(replica)
            self._start(replica, now_s)

    def _free_numbers(self) -> Iterator[int]:
        taken = {each.number for each in self._replicas}
        return (number for number in range(len(taken) + 1) if number not in taken)

    def _start(self, each: Replica, now_s: float) -> None:
        self._num_started += 1
        each.incarnation = self._num_started
        bounds = self._settings.bounds
        share = self.target if bounds.is_fixed else bounds.max_replicas
        each.server = self._servers.start(each.number, max(1, share))
        self._enter(each, Phase.STARTING, now_s)
        logger.info("starting replica=%d pid=%s", each.number, each.server.pid or "-")

    def _drain(self, each: Replica, now_s: float) -> None:
        assert each.server is not None
        self._enter(each, Phase.DRAINING, now_s)
        each.server.terminate()
        logger.info("draining replica=%d timeout_s=%g", each.number, self._settings.drain_s)

    def _check_that_one_is_left(self) -> None:
        wanted = [each for each in self._replicas if each.is_wanted]
        if wanted and all(each.phase is Phase.FAILED for each in wanted):
            last = wanted[-1]
            self.failure = self.failure or FleetOutcome(
                1,
                f"all replicas were given up: {last.name} failed {counted(last.restarts.count, 'time')} within "
                f"{WINDOW_S:g} s and at last {last.last_failure}",
            )

    def _write_list(self) -> None:
        workers = [
            ListedWorker(f"{each.number}-{each.incarnation}", each.server.url, model_id=each.server.model)
            for each in self.replicas
            if each.phase is Phase.READY and each.server is not None and each.server.url is not None
        ]
        try:
            self._listing.write(workers)
        except ConfigError as error:
            # A full disk is no reason to end servers; it is tried again in each pass.
            if not self._is_list_late:
                logger.error("%s", error)
            self._is_list_late = True
        else:
            self._is_list_late = False

    def _enter(self, each: Replica, phase: Phase, now_s: float) -> None:
        each.phase, each.since_s = phase, now_s
