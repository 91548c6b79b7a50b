"""`RankLoop`: the loop of a rank other than 0; it executes the steps that rank 0 sends, in order.

With overlap it launches a step before it waits for the previous one, like rank 0, and while a step runs it waits for
the next plan and not for the device: rank 0 needs a fraction of a step to settle and to plan, and a plan that is
launched only after the device has finished leaves the device idle for the time of the launch. It is never more than one
step ahead, because rank 0 does not send more.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Protocol, assert_never

from ...runtime.messages import HEARTBEAT_INTERVAL_S
from ...runtime.step_plan import DropAdapter, LaunchStep, ReadAdapter
from .ranked_runner import WaitingPending

if TYPE_CHECKING:
    from ...launch.child.child import Child
    from ...runtime.step_plan import Pending, RankInput, Runner
    from ...runtime.transport.cluster_ipc import ClusterClient
    from ...runtime.transport.ipc import Inbox
    from ..adapters.adapter_store import AdapterStore
    from .staged_runner import StageRank
    from .tp_group import TPGroup


class RankTransfer(Protocol):
    """Moves the rank's KV to or from other engines, beside its loop."""

    def launched(self, step_id: int) -> None:
        """The rank has launched a step."""
        ...

    def check(self) -> None:
        """Raise what has ended its thread. A bug; it ends the process."""
        ...


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
        adapters: AdapterStore | None = None,
        stage: StageRank | None = None,
        transfer: RankTransfer | None = None,
    ) -> None:
        """Take the parts.

        Args:
            adapters: the store of the runner's adapters; None: it has none.
            stage: launches the runner's steps if the model has pipeline stages; None: it has none.
            transfer: moves KV between engines; None: nothing does.
        """
        self._transfer = transfer
        self._stage = stage
        self._runner = runner
        self._adapters = adapters
        self._inbox = inbox
        self._child = child
        self._group = group
        self._max_left_in_flight = 1 if overlap else 0
        self._in_flight: deque[Pending] = deque()
        self._last_step_id = 0

    def run(self) -> None:
        """Run until the supervisor requests a stop."""
        while not self._child.stop_requested():
            self.step()
            self._child.heartbeat()

    def step(self) -> None:
        """Execute the steps that rank 0 has sent.

        It waits half a second for a message. If none comes it waits for the oldest step in flight. A rank of a pipeline
        stage does not wait for a message while a step is in flight: rank 0 may need its answer for the next plan.
        """
        answers = self._stage is not None and bool(self._in_flight)
        messages = self._inbox.poll(0.0 if answers else HEARTBEAT_INTERVAL_S)
        if self._transfer is not None:
            self._transfer.check()
        for message in messages:
            match message:
                case LaunchStep():
                    self._launch(message)
                case ReadAdapter() | DropAdapter():
                    self._change_adapters(message)
                case _:
                    assert_never(message)
        if not messages and self._in_flight:
            self._in_flight.popleft().wait()

    def _change_adapters(self, message: ReadAdapter | DropAdapter) -> None:
        assert self._adapters is not None, "rank 0 has adapters, and this rank has no memory for them"
        if isinstance(message, ReadAdapter):
            self._adapters.read_later(message.store_id, message.adapter)
        else:
            self._adapters.drop(message.store_id)

    def _launch(self, message: LaunchStep) -> None:
        plan = message.plan
        if self._adapters is not None:
            for _, store_id in struct.iter_unpack("<ii", plan.adapter_loads):
                self._adapters.wait_for(store_id)  # rank 0 has read it, and this rank may be slower
        if plan.step_id != self._last_step_id + 1:
            raise RuntimeError(f"step {plan.step_id} came after step {self._last_step_id}: a plan was lost")
        self._last_step_id = plan.step_id
        pending = self._runner.launch(plan) if self._stage is None else self._stage.launch(message)
        if self._transfer is not None:
            self._transfer.launched(plan.step_id)
        self._in_flight.append(WaitingPending(pending, self._group))
        while len(self._in_flight) > self._max_left_in_flight:
            self._in_flight.popleft().wait()
