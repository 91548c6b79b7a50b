"""`Dispatcher`: sends requests to the replicas of the model, and everything else to all of them.

A request goes to the replica that its client names (`data_parallel_rank`), or that the policy chooses among those that
run. The parallel samples of a prompt stay together, because they share its pages. Messages about a request are sent to
every replica: they name an id, and a replica that does not know it ignores them; an abort thus never misses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...runtime.messages import GenerateRequest, SchedulerInput
from ..engine_state import EngineState
from ..request_log import LoggedRequest
from .handoffs import DECODE, PREFILL, Pair
from .policies import DispatchPolicy, ReplicaLoad


class Dispatcher:
    """See the module. It writes `LoggedRequest.replica`.

    Attributes:
        loads: of each replica.
    """

    def __init__(
        self,
        sends: Sequence[Callable[[SchedulerInput], None]],
        policy: DispatchPolicy,
        engine: EngineState,
        pair: Pair | None = None,
    ) -> None:
        """Send nothing yet.

        Args:
            sends: to the scheduler of each replica; must not block.
            policy: chooses among several replicas.
            engine: which of them run.
            pair: with `--disaggregation-mode both`; there are two replicas.
        """
        self._sends = sends
        self._policy = policy
        self._engine = engine
        self._pair = pair
        self.loads = [ReplicaLoad() for _ in sends]
        self._groups: dict[str, list[int]] = {}  # group of parallel samples -> [its replica, live members]

    def send(self, message: SchedulerInput) -> None:
        """Broadcast a message that is no request. A restarted replica ignores unknown ids."""
        for send in self._sends:
            send(message)
        if self._pair is not None and (half := self._pair.mirrored(message)) is not None:
            self._sends[PREFILL](half)

    def submit(self, logged: LoggedRequest) -> None:
        """Send the message of a request to one of the replicas that run; there is one."""
        message = logged.message
        logged.replica = replica = self._replica_for(message)
        self.loads[replica].add(message)
        if message.group:
            self._groups.setdefault(message.group, [replica, 0])[1] += 1
        self._policy.sent(message, replica)
        halves = self._pair.halves(message) if self._pair is not None and replica == DECODE else None
        if halves is None or PREFILL not in self._engine.running:
            self._sends[replica](message)
            return
        for send, half in zip(self._sends, halves, strict=True):
            send(half)

    def started(self, logged: LoggedRequest, cached_tokens: int) -> None:
        """The first token of a request has arrived."""
        if logged.replica is not None:
            self._policy.started(logged.message, logged.replica, cached_tokens)

    def withdraw(self, logged: LoggedRequest) -> None:
        """A request has ended or is no longer with its replica; nothing happens if it never was with one."""
        if logged.replica is None:
            return
        message = logged.message
        self.loads[logged.replica].remove(message)
        logged.replica = None
        self._policy.ended(message)
        if (group := self._groups.get(message.group)) is not None:
            group[1] -= 1
            if group[1] == 0:
                del self._groups[message.group]

    def lost(self, replica: int) -> None:
        """A replica is lost, with its cache."""
        self._policy.restarted(replica)

    def _replica_for(self, message: GenerateRequest) -> int:
        running = self._engine.running
        assert running, "no replica runs"
        if len(running) == 1:
            return running[0]
        if self._pair is not None:
            return DECODE
        if message.data_parallel_rank in running:
            assert message.data_parallel_rank is not None
            return message.data_parallel_rank
        group = self._groups.get(message.group)
        if message.group and group is not None and group[0] in running:
            return group[0]
        return self._policy.choose(message, self.loads, running)
