"""`Recovery`: restarts what was lost while the engine serves, and says so to the tokenizer manager.

| lost | started again | what becomes of requests |
|---|---|---|
| scheduler, or a rank of its group | all ranks, and the detokenizer | submitted again by the tokenizer manager |
| detokenizer | the detokenizer | submitted again by the tokenizer manager |
| tokenizer manager | the tokenizer manager, on the same port | connections break, the scheduler aborts them |

The detokenizer goes with the scheduler because rows of the lost one may still be on their way to it: so nothing of the
former life can reach the new one. Every new process binds the address of the one before, whose peers reconnect by
themselves. What they had queued for it arrives at the new one, and harms nobody: it is about ids that are used no more.

Restarts end with the engine if there are more than `max_restarts` within `WINDOW_S`. They are for lost processes alone:
what the user must mend ends the engine at once, as does anything that happens before all processes were ready, and with
several machines any loss does.
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

from ..runtime.child.control import PeersLost, PeersReady, Role, Settings
from ..runtime.feasibility import Capacity
from .child_process import ChildProcess
from .child_watch import ChildFailure, ChildWatch

logger = logging.getLogger(__name__)

WINDOW_S: Final = 300.0
_REPLICA: Final = (Role.SCHEDULER, Role.MODEL_RUNNER, Role.DETOKENIZER)
_GOES_WITH: Final[Mapping[Role, Sequence[Role]]] = {
    Role.SCHEDULER: _REPLICA,
    Role.MODEL_RUNNER: _REPLICA,
    Role.DETOKENIZER: (Role.DETOKENIZER,),
    Role.TOKENIZER_MANAGER: (Role.TOKENIZER_MANAGER,),
}


class RestartBudget:
    """So many restarts within `WINDOW_S`; knows the first of their causes.

    The time in which a restart has not come to its end does not count: a start may take longer than the window
    (`--startup-timeout`), and one that never succeeds would be tried for ever.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts: deque[tuple[float, str]] = deque()  # when it had succeeded, or inf; why it was made

    def succeeded(self, now_s: float) -> None:
        """All processes can work: the window of the restarts that led to it begins."""
        self._restarts = deque([(min(at_s, now_s), cause) for at_s, cause in self._restarts])

    @property
    def num_left(self) -> int:
        """How many more there may be within the window of those that were."""
        return self._max_restarts - len(self._restarts)

    def take(self, now_s: float, cause: str) -> str | None:
        """One more restart.

        Returns:
            None if there may be one, else why the engine ends: the first cause of those that were too many.
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
    """See the module. Made when all processes are ready."""

    def __init__(
        self,
        watch: ChildWatch,
        rooms: Mapping[Role, str],
        settings: Sequence[Settings],
        *,
        forget_ranks: Callable[[], None],
        report: Callable[[str, Sequence[ChildProcess]], str],
        started_requests: Callable[[], Collection[str] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over from the start.

        Args:
            settings: of all processes, in the order of their start.
            forget_ranks: removes what the ranks of a group left for each other.
            report: writes about a cause and the processes that it cost; what to add to the line that tells of it.
            started_requests: which ones the scheduler that lives, or lived last, has begun to work on; None: unknown.
        """
        server = settings[0].config.server
        self._watch = watch
        self._rooms = rooms
        self._settings = list(settings)
        self._forget_ranks = forget_ranks
        self._report = report
        self._started_requests = started_requests
        self._clock = clock
        self._budget = RestartBudget(server.max_restarts)
        self._num_restarts = 0
        self._started_s = 0.0
        self._is_whole = True
        self._manager_knows = True  # that the others can work

    @property
    def manager(self) -> ChildProcess:
        """The tokenizer manager at present."""
        return next(child for child in self._watch.children if child.role is Role.TOKENIZER_MANAGER)

    def look(self) -> None:
        """A pass of `ChildWatch.look`, after which what it found lost is being started again.

        Raises:
            ChildFailure: it cannot be, or was too often.
        """
        try:
            self._watch.look()
            if not self._is_whole:
                self._watch.check_start(self._watch.children, self._started_s)
        except ChildFailure as failure:
            self._restart(failure)
        if not self._is_whole:
            self._go_on()

    def _restart(self, failure: ChildFailure) -> None:
        lost, nodes = failure.child, self._watch.nodes
        if nodes is not None and failure.exit_code == 1:
            raise ChildFailure(f"{failure.message}; {nodes.restart}", child=lost) from failure
        if lost is None or lost.stopping or failure.exit_code == 2:
            raise failure
        now_s = self._clock()
        if (end := self._budget.take(now_s, failure.message)) is not None:
            raise ChildFailure(end) from failure
        roles = _GOES_WITH[lost.role]
        if Role.TOKENIZER_MANAGER not in roles and self._manager_knows:
            started = self._started_requests()
            self.manager.send(
                PeersLost(
                    f"{failure.message}; it is being restarted, and requests go on then",
                    None if started is None else tuple(started),
                )
            )
        self._is_whole = self._manager_knows = False
        self._num_restarts += 1
        self._started_s = now_s
        if Role.TOKENIZER_MANAGER in roles:
            self._keep_port()
        gone = [child for child in self._watch.children if child.role in roles]
        for child in gone:
            self._watch.remove(child)
        logger.error(
            "restarting processes=%s restart=%d cause: %s",
            ",".join(child.label for child in gone),
            self._num_restarts,
            failure.message + self._report(failure.message, gone),
        )
        if Role.SCHEDULER in roles:
            self._forget_ranks()
        for settings in self._settings:
            if settings.role in roles:
                self._watch.start(self._rooms[settings.role], replace(settings, life=self._num_restarts))

    def _keep_port(self) -> None:
        """The next tokenizer manager listens where this one did, also if that was a free port."""
        ready = self.manager.ready
        if ready is None or ready.url is None or (port := urlsplit(ready.url).port) is None:
            return
        for idx, settings in enumerate(self._settings):
            server = replace_fields(settings.config.server, port=port)
            config = replace_fields(settings.config, server=server)
            self._settings[idx] = replace(settings, config=config)

    def _go_on(self) -> None:
        """Once all others can work, the tokenizer manager gets to know it."""
        children = self._watch.children
        others = [child for child in children if child.role is not Role.TOKENIZER_MANAGER]
        if not self._manager_knows and all(child.ready for child in others):
            self.manager.send(PeersReady(capacity_of_scheduler(others), self._budget.num_left))
            self._manager_knows = True
        if self._manager_knows and self.manager.ready:
            self._is_whole = True
            now_s = self._clock()
            self._budget.succeeded(now_s)
            recovery_s = now_s - self._started_s
            logger.info("recovered restart=%d recovery_s=%.2f", self._num_restarts, recovery_s)


def capacity_of_scheduler(children: Sequence[ChildProcess]) -> Capacity:
    """What the scheduler can hold, as it said when it became ready.

    Raises:
        ChildFailure: it has not said it.
    """
    scheduler = next(child for child in children if child.role is Role.SCHEDULER)
    if scheduler.ready is None or scheduler.ready.capacity is None:
        raise ChildFailure("scheduler is ready and has not said what it can hold")
    return scheduler.ready.capacity
