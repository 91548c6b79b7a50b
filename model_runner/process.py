"""The process of a rank other than 0 of a model with several ranks: another part of the weights, the same steps.

It makes no decisions. With tensor parallelism its part of each layer enters the sums over ranks; a pipeline stage
sends what its layers return to the next one, and results to rank 0.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import msgspec

from ..launch.child.child import Child
from ..launch.resolve.memory_budget import capacity_of
from ..runtime.kv_backends.make_backend import make_target, make_writer
from ..runtime.step_plan import RankInput
from ..runtime.transport.cluster_ipc import PLANS, ClusterClient, load_cluster_key
from ..runtime.transport.ipc import Inbox
from ..runtime.transport.rank_transfer import worker_name
from .distributed.join_group import join_group
from .distributed.rank_loop import RankLoop
from .distributed.ranked_runner import rank_name
from .distributed.staged_runner import StageRank
from .distributed.transfer_worker import ComputedSteps, TransferWorker
from .load import load_model_runner
from .memory.page_memory import PageMemory

if TYPE_CHECKING:
    from .model_runner import ModelRunner


def main(child: Child) -> None:
    """Load this rank's part of the model, then execute steps until the supervisor requests a stop."""
    settings = child.settings
    config = settings.config
    inbox = _inbox(child)

    place = join_group(child)
    group = place.group
    runner = load_model_runner(
        config, settings.source, settings.spec, capacity_of(config, settings.spec), place
    )
    gc.collect()
    gc.freeze()
    gc.enable()

    assert config.scheduler.overlap != "auto", "the configuration is not resolved"
    adapters = None if runner.adapters is None else runner.adapters.store
    stage = None if place.wire is None else StageRank(runner, place.wire, group)
    transfer = _make_transfer(child, runner)
    loop = RankLoop(
        runner,
        inbox,
        child,
        group,
        overlap=config.scheduler.overlap,
        adapters=adapters,
        stage=stage,
        transfer=transfer,
    )
    group.meet("loaded")
    child.ready()
    try:
        loop.run()
    finally:
        if transfer is not None:
            transfer.close()


def _make_transfer(child: Child, runner: ModelRunner) -> TransferWorker | None:
    """The worker that moves this rank's KV to other engines or a disk; None: nothing does.

    Raises:
        ConfigError: the backend's library is missing or unusable.
    """
    settings = child.settings
    server, mode = settings.config.server, settings.config.scheduler.disaggregation_mode
    if mode == "null" and not settings.config.cache.kv_tier:
        return None
    memory, states = PageMemory(runner.kv_pool.views), runner.state_pool
    return TransferWorker(
        settings.endpoints.kv_transfer,
        worker_name(settings.rank, settings.life),
        memory,
        writer=make_writer(server.transfer_backend, memory, server.host) if mode == "prefill" else None,
        target=make_target(server.transfer_backend, memory, server.host) if mode == "decode" else None,
        computed=ComputedSteps(runner.kv_pool.k[0].device),
        states=None if states is None else PageMemory(states.checkpoint_views),
    )


def _inbox(child: Child) -> Inbox[RankInput] | ClusterClient[RankInput]:
    """The receiver of rank 0's steps: a local socket on its machine, a network connection on other machines."""
    settings = child.settings
    parallel = settings.config.parallel
    decoder: msgspec.msgpack.Decoder[RankInput] = msgspec.msgpack.Decoder(RankInput)
    if parallel.node_rank == 0:
        return Inbox(settings.endpoints.model_runners[settings.rank - 1], decoder, wake=child)
    assert parallel.dist_init_addr is not None
    key = load_cluster_key(parallel.cluster_key_file)
    return ClusterClient(parallel.dist_init_addr, PLANS, rank_name(settings.rank), key, decoder, wake=child)
