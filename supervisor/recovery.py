"""`Recovery`: restarts processes that were lost while the engine serves, and informs the tokenizer manager.

| lost | restarted | requests |
|---|---|---|
| scheduler, or a rank of its group | its replica: ranks and detokenizer | resubmitted by the tokenizer manager |
| detokenizer | the detokenizer | resubmitted by the tokenizer manager |
| tokenizer manager | the tokenizer manager, on the same port | connections break, the scheduler aborts the requests |

The detokenizer is restarted with the scheduler because rows of the lost scheduler may still be on their way to it: this
way no row of the lost one can reach the new one. Every new process binds the address of its predecessor, and its peers
reconnect automatically. Messages that they had queued arrive at the new process and have no effect, because they name
request ids that are no longer in use.

More than `max_restarts` restarts within `WINDOW_S` end the engine. Only lost processes are restarted: an error that the
user must fix ends the engine at once, as does any failure before all processes were ready, and with several machines
any loss does.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace as replace_fields
from typing import Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from ..launch.child.control import PeersLost, PeersReady, Role, Settings
from ..runtime.feasibility import Capacity
from .child_process import ChildProcess
from .child_watch import ChildFailure, ChildWatch
from .standby import Standby

logger = logging.getLogger(__name__)

WINDOW_S: Final = 300.0
STANDBY_AFTER_S: Final = 5.0
"""From then on a scheduler is held for the next restart: it must not delay the first answers."""
_REPLICA: Final = (Role.SCHEDULER, Role.MODEL_RUNNER, Role.DETOKENIZER)
_GOES_WITH: Final[Mapping[Role, Sequence[Role]]] = {
    Role.SCHEDULER: _REPLICA,
    Role.MODEL_RUNNER: _REPLICA,
    Role.DETOKENIZER: (Role.DETOKENIZER,),
    Role.TOKENIZER_MANAGER: (Role.TOKENIZER_MANAGER,),
}


class RestartBudget:
    """At most `max_restarts` within `WINDOW_S`; remembers the first of their causes.

    The window of a restart begins when it has succeeded: a start may take longer than the window
    (`--startup-timeout`), and one that never succeeds would otherwise be retried forever.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts: deque[tuple[float, str]] = deque()  # when it succeeded, or inf; its cause

    def succeeded(self, now_s: float) -> None:
        """All processes can work: the window of the pending restarts begins."""
        self._restarts = deque([(min(at_s, now_s), cause) for at_s, cause in self._restarts])

    @property
    def num_left(self) -> int:
        """Restarts that are still allowed, given the recent ones."""
        return self._max_restarts - len(self._restarts)

    def take(self, now_s: float, cause: str) -> str | None:
        """Count one more restart.

        Returns:
            None if it is allowed, else why the engine ends: the first cause of the restarts that were too many.
        """
        restarts = self._restarts
        while restarts and now_s - restarts[0][0] > WINDOW_S:
            restarts.popleft()
        if self._max_restarts == 0:
            return cause
        if len(restarts) < self._max_restarts:
            restarts.append((math.inf, cause))
            return None
        return (
            f"{restarts[0][1]}; that was the first of {len(restarts) + 1} crashes within {WINDOW_S / 60:g} minutes, "
            f"and --max-restarts is {self._max_restarts}; the last one: {cause}"
        )


class Recovery:
    """See the module. Created when all processes are ready."""

    def __init__(
        self,
        watch: ChildWatch,
        modules: Mapping[Role, str],
        settings: Sequence[Settings],
        *,
        forget_ranks: Callable[[int], None],
        report: Callable[[str, Sequence[ChildProcess]], str],
        started_requests: Callable[[int], Collection[str] | None] = lambda replica: None,
        standby: Standby | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the processes as they were started.

        Args:
            settings: of all processes, in the order of their start.
            forget_ranks: removes the file through which the ranks of a replica find each other.
            report: writes a crash report about a cause and the lost processes; returns the suffix for the log line.
            started_requests: requests that the current or last scheduler of a replica has started; None: unknown.
            standby: holds a scheduler for the next restart; None: there shall be none.
        """
        server = settings[0].config.server
        self._watch = watch
        self._modules = modules
        self._settings = list(settings)
        self._forget_ranks = forget_ranks
        self._report = report
        self._started_requests = started_requests
        self._standby = standby
        self._clock = clock
        self._whole_s = clock()
        self._budget = RestartBudget(server.max_restarts)
        self._num_restarts = 0
        self._started_s = 0.0
        self._is_whole = True
        self._manager_waits = False  # a new one, until all others can work
        # The manager knows that they are lost, and does not know yet that they are back.
        self._lost_replicas: set[int] = set()

    @property
    def manager(self) -> ChildProcess:
        """The current tokenizer manager."""
        return next(child for child in self._watch.children if child.role is Role.TOKENIZER_MANAGER)

    def poll(self) -> None:
        """A pass of `ChildWatch.poll`; restarts what it found lost.

        Raises:
            ChildFailure: a restart is not possible, or there were too many.
        """
        try:
            self._watch.poll()
            if not self._is_whole:
                self._watch.check_start(self._watch.children, self._started_s)
        except ChildFailure as failure:
            self._restart(failure)
        if not self._is_whole:
            self._go_on()
        elif self._standby is not None and self._clock() - self._whole_s > STANDBY_AFTER_S:
            self._standby.start()

    def _restart(self, failure: ChildFailure) -> None:
        lost, nodes = failure.child, self._watch.nodes
        if nodes is not None and failure.exit_code == 1:
            raise ChildFailure(f"{failure.message}; {nodes.restart}", child=lost) from failure
        if lost is None or lost.stopping or failure.exit_code == 2:
            raise failure
        now_s = self._clock()
        if (end := self._budget.take(now_s, failure.message)) is not None:
            raise ChildFailure(end) from failure
        roles, replica = _GOES_WITH[lost.role], lost.replica
        is_manager = lost.role is Role.TOKENIZER_MANAGER
        if not is_manager and not self._manager_waits and replica not in self._lost_replicas:
            started = self._started_requests(replica)
            self.manager.send(
                PeersLost(
                    f"{failure.message}; it is being restarted, and requests continue then",
                    None if started is None else tuple(started),
                    replica,
                    self._budget.num_left,
                )
            )
        self._is_whole = False
        if is_manager:
            self._manager_waits = True
            self._lost_replicas.clear()
            self._keep_port()
        elif not self._manager_waits:
            self._lost_replicas.add(replica)
        self._num_restarts += 1
        self._started_s = now_s
        gone = [child for child in self._watch.children if child.role in roles and child.replica == replica]
        for child in gone:
            self._watch.remove(child)
        logger.error(
            "restarting processes=%s restart=%d cause: %s",
            ",".join(child.label for child in gone),
            self._num_restarts,
            failure.message + self._report(failure.message, gone),
        )
        if Role.SCHEDULER in roles:
            self._forget_ranks(replica)
        for settings in self._settings:
            if settings.role in roles and settings.replica == replica:
                self._watch.start(self._modules[settings.role], replace(settings, life=self._num_restarts))

    def _keep_port(self) -> None:
        """Make the next tokenizer manager listen on the same port, also if it was a free port."""
        ready = self.manager.ready
        if ready is None or ready.url is None or (port := urlsplit(ready.url).port) is None:
            return
        for idx, settings in enumerate(self._settings):
            server = replace_fields(settings.config.server, port=port)
            config = replace_fields(settings.config, server=server)
            self._settings[idx] = replace(settings, config=config)

    def _go_on(self) -> None:
        """Once other processes can work, inform the tokenizer manager; a new one when all of them can."""
        others = [child for child in self._watch.children if child.role is not Role.TOKENIZER_MANAGER]
        if self._manager_waits:
            if all(child.ready for child in others):
                self._tell_of(others, replica=0)
                self._manager_waits = False
        else:
            for replica in sorted(self._lost_replicas):
                of_replica = [child for child in others if child.replica == replica]
                if all(child.ready for child in of_replica):
                    self._tell_of(of_replica, replica)
                    self._lost_replicas.remove(replica)
        if not self._manager_waits and not self._lost_replicas and self.manager.ready:
            self._is_whole = True
            now_s = self._whole_s = self._clock()
            self._budget.succeeded(now_s)
            recovery_s = now_s - self._started_s
            logger.info("recovered restart=%d recovery_s=%.2f", self._num_restarts, recovery_s)

    def _tell_of(self, children: Sequence[ChildProcess], replica: int) -> None:
        capacity, about = scheduler_facts(children)
        self.manager.send(PeersReady(capacity, self._budget.num_left, about, replica))


def scheduler_facts(children: Sequence[ChildProcess]) -> tuple[Capacity, dict[str, str]]:
    """The capacity that each of the schedulers has, and the details of the first, from their `Ready` messages.

    Raises:
        ChildFailure: one has not sent it.
    """
    capacities, details = list[Capacity](), list[dict[str, str]]()
    for child in children:
        if child.role is Role.SCHEDULER:
            if child.ready is None or child.ready.capacity is None:
                raise ChildFailure(f"{child.name} is ready but has not sent its capacity")
            capacities.append(child.ready.capacity)
            details.append(child.ready.details)
    return min(capacities, key=lambda capacity: capacity.num_pages), details[0]
