"""`RankLoop`: a rank other than 0 in motion: it executes the steps that rank 0 sends, in their order.

Like rank 0 it launches a step before it waits for the one before, if steps overlap; it never runs further ahead,
because rank 0 does not send further ahead.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ...runtime.messages import HEARTBEAT_INTERVAL_S
from .ranked_runner import WaitingPending

if TYPE_CHECKING:
    from ...runtime.child.child import Child
    from ...runtime.step_plan import Pending, RankInput, Runner
    from ...runtime.transport.cluster_ipc import ClusterClient
    from ...runtime.transport.ipc import Inbox
    from .tp_group import TPGroup


class RankLoop:
    """One rank and its connections."""

    def __init__(
        self,
        runner: Runner,
        inbox: Inbox[RankInput] | ClusterClient[RankInput],
        child: Child,
        group: TPGroup,
        *,
        overlap: bool,
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._child = child
        self._group = group
        self._max_left_in_flight = 1 if overlap else 0
        self._in_flight: deque[Pending] = deque()
        self._last_step_id = 0

    def run(self) -> None:
        """Go round until the supervisor says stop."""
        while not self._child.stop_requested():
            self.step()
            self._child.heartbeat()

    def step(self) -> None:
        """Take what rank 0 has sent, and execute it; without anything, wait for it for half a second."""
        messages = self._inbox.poll(0.0 if self._in_flight else HEARTBEAT_INTERVAL_S)
        for message in messages:
            self._launch(message)
        if not messages and self._in_flight:
            self._in_flight.popleft().wait()

    def _launch(self, message: RankInput) -> None:
        plan = message.plan
        if plan.step_id != self._last_step_id + 1:
            raise RuntimeError(f"step {plan.step_id} came after step {self._last_step_id}: a plan was lost")
        self._last_step_id = plan.step_id
        self._in_flight.append(WaitingPending(self._runner.launch(plan), self._group))
        while len(self._in_flight) > self._max_left_in_flight:
            self._in_flight.popleft().wait()
