"""`join_group`: a rank's place among the others, from the settings of its process: device and connections.

Ranks on the CPU share its cores by their number of threads (`resolve`), and are not pinned: gloo's own threads would be
pinned with them and take turns with the ones that compute. A product of 1024 x 1024 and the sum over two ranks took
0.5 ms unpinned and 2 ms pinned, one thread each on two cores.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ...runtime.errors import ConfigError
from ...runtime.transport.cluster_ipc import STORE, parse_address
from ..weights.fingerprint import weights_fingerprint
from .tp_group import SINGLE_RANK, Rendezvous, TorchGroup, TPGroup

if TYPE_CHECKING:
    from ...runtime.child.child import Child

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a rank works: its group, and its device (None: the one the configuration names)."""

    group: TPGroup
    device: torch.device | None


ALONE: Final = Place(SINGLE_RANK, None)


def join_group(child: Child) -> Place:
    """Wait for the other ranks and connect to them; at once where there is one rank only.

    Also lets the child send heartbeats while it waits for others in a step.

    Raises:
        RankLostError: they have not come.
        ConfigError: rank 0 cannot listen for them, or they have other weights.
    """
    settings = child.settings
    config, parallel = settings.config, settings.config.parallel
    if parallel.tp == 1:
        return ALONE
    local_rank = settings.rank % parallel.ranks_per_node
    device = torch.device("cpu")
    if config.model.device == "cuda":
        device = torch.device("cuda", local_rank)
    group = TorchGroup(
        Rendezvous(
            rank=settings.rank,
            size=parallel.tp,
            device=device,
            file=Path(settings.endpoints.rank_store),
            address=store_address(parallel.dist_init_addr) if parallel.nnodes > 1 else None,
            step_timeout_s=parallel.dist_timeout,
            start_timeout_s=config.server.startup_timeout,
        )
    )
    child.beat_while(lambda: group.waiting)
    logger.info("joined rank=%d of=%d device=%s", settings.rank, parallel.tp, device)
    if parallel.nnodes > 1:
        check_weights(group, Path(settings.source.path), config.model.load_format)
    return Place(group, device)


def check_weights(group: TorchGroup, path: Path, load_format: str) -> None:
    """Find out, before they are loaded, whether the machines have the same weights.

    Raises:
        ConfigError: they do not.
        RankLostError: somebody has gone.
    """
    try:
        differing = group.differing("weight files", weights_fingerprint(path, load_format))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if differing:
        ranks = " and ".join(map(str, differing))
        raise ConfigError(
            f"the weight files of rank {ranks} are not those of rank 0, though the configurations are the same; copy "
            "one model to all machines"
        )


def store_address(dist_init_addr: str | None) -> tuple[str, int]:
    """Host and port at which ranks of several machines find each other."""
    assert dist_init_addr is not None
    host, port = parse_address(dist_init_addr)
    return host, port + STORE
