"""`RankedRunner`: rank 0's runner with tensor parallelism: sends each step to the other ranks, then launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import zmq

from ...runtime.errors import RankLostError
from ...runtime.step_plan import DropAdapter, LaunchStep, RankInput, ReadAdapter, no_masks, to_the_end
from ...runtime.transport.cluster_ipc import PLANS, ClusterServer, load_cluster_key
from ...runtime.transport.ipc import FanOutbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...runtime.adapter_spec import AdapterSpec
    from ...runtime.config.device_config import ParallelConfig
    from ...runtime.step_plan import GetMasks, GoOn, Pending, Runner, StepPlan, StepResult
    from ...runtime.transport.message_base import Message
    from ..adapters.adapter_store import AdapterRead, AdapterStore
    from .tp_group import TPGroup


class Sender(Protocol):
    """Sends messages to all other ranks, in order and without loss."""

    def send(self, message: Message) -> None: ...


@dataclass(slots=True, eq=False)
class RankedRunner:
    """A `Runner`. A plan is sent to the other ranks first; they decode it while rank 0 builds its own batch."""

    runner: Runner
    others: Sender
    group: TPGroup

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        assert plan.num_rounds == 1, "the other ranks cannot know when a multi-step decode ends"
        self.others.send(LaunchStep(plan))
        return WaitingPending(self.runner.launch(plan, go_on, masks), self.group)


class RankedAdapters:
    """The adapters of all ranks: each reads its part of them."""

    def __init__(self, store: AdapterStore, others: Sender) -> None:
        """Take rank 0's store, and the connection to the other ranks."""
        self._store = store
        self._others = others

    def read_later(self, store_id: int, spec: AdapterSpec) -> None:
        self._others.send(ReadAdapter(store_id, spec))
        self._store.read_later(store_id, spec)

    def done(self) -> list[AdapterRead]:
        """The other ranks wait for their own reads when a step needs them."""
        return self._store.done()

    def wait(self) -> AdapterRead:
        return self._store.wait()

    def drop(self, store_id: int) -> None:
        self._others.send(DropAdapter(store_id))
        self._store.drop(store_id)


@dataclass(slots=True, eq=False)
class WaitingPending:
    """A step in flight that may depend on the other ranks: on a GPU a rank waits for them in `wait`."""

    pending: Pending
    group: TPGroup

    def wait(self) -> StepResult:
        with self.group.wait_for_others():
            return self.pending.wait()


class OtherRanks:
    """The connections to all other ranks: one local socket per rank of this machine, one port for other machines."""

    def __init__(self, endpoints: Sequence[str], parallel: ParallelConfig) -> None:
        """Connect to the ranks of this machine and listen for those of other machines.

        Args:
            endpoints: endpoints of the ranks on this machine.

        Raises:
            ConfigError: the port for the ranks of other machines cannot be opened.
        """
        self._local = FanOutbox(endpoints)
        self._remote: ClusterServer[RankInput] | None = None
        self._names = [rank_name(rank) for rank in range(parallel.ranks_per_node, parallel.num_ranks)]
        if parallel.nnodes > 1:
            assert parallel.dist_init_addr is not None
            key = load_cluster_key(parallel.cluster_key_file)
            self._remote = ClusterServer(parallel.dist_init_addr, PLANS, key)

    def wait(self, timeout_s: float) -> None:
        """Wait until the ranks of other machines are connected.

        Raises:
            RankLostError: a rank has not connected in time.
        """
        if self._remote is not None:
            self._remote.wait_for(self._names, timeout_s)

    def send(self, message: Message) -> None:
        """See `Sender`.

        Raises:
            RankLostError: a rank of another machine is not connected any more.
        """
        self._local.send(message)
        if self._remote is not None:
            try:
                self._remote.send_all(self._names, message)
            except zmq.ZMQError as error:
                raise RankLostError(
                    f"rank 0 lost the connection to a rank of another machine: {error}"
                ) from error


def rank_name(rank: int) -> str:
    """The name of a rank of another machine on its connection."""
    return f"rank {rank}"
