"""`join_group`: connects a rank to the others and chooses its device, from the settings of its process.

Ranks on the CPU share its cores by their number of threads (`resolve`) and are not pinned: gloo's own threads would be
pinned with them and compete with the computing threads. A matmul of 1024 x 1024 and the sum over two ranks took 0.5 ms
unpinned and 2 ms pinned, one thread each on two cores.
"""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ...launch.resolve.stages import WHOLE_MODEL, Stage, stage_of
from ...models.gguf.gguf_split import parts_of
from ...models.weight_files.safetensors_header import weight_files
from ...runtime.errors import ConfigError
from ...runtime.transport.cluster_ipc import STORE, parse_address
from .one_shot_group import with_one_shot_sums
from .pp_link import TorchWire
from .stage_group import StageGroup
from .tp_group import SINGLE_RANK, Rendezvous, TorchGroup, TPGroup

if TYPE_CHECKING:
    from ...launch.child.child import Child
    from .pp_link import StageWire

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Place of a rank.

    Attributes:
        group: the ranks that share its layers.
        device: None: the device of the configuration.
        wire: connects it to the ranks of other pipeline stages; None: there are none.
    """

    group: TPGroup
    device: torch.device | None
    wire: StageWire | None = None

    @property
    def stage(self) -> Stage:
        """The pipeline stage of the rank."""
        return WHOLE_MODEL if self.wire is None else self.wire.stage


ALONE: Final = Place(SINGLE_RANK, None)


def join_group(child: Child) -> Place:
    """Wait for the other ranks and connect to them; returns at once if there is only one rank.

    Also lets the child send heartbeats while it waits for other ranks in a step.

    Raises:
        RankLostError: a rank has not connected in time.
        ConfigError: rank 0 cannot listen for the others, or the ranks have different weights.
    """
    settings = child.settings
    config, parallel = settings.config, settings.config.parallel
    if parallel.num_ranks == 1 and settings.replica == 0:
        return ALONE
    local_rank = settings.replica * parallel.ranks_per_node + settings.rank % parallel.ranks_per_node
    device = torch.device("cpu")
    if config.model.device == "cuda":
        device = torch.device("cuda", local_rank)
    if parallel.num_ranks == 1:
        return Place(SINGLE_RANK, device)
    group = TorchGroup(
        Rendezvous(
            rank=settings.rank,
            size=parallel.num_ranks,
            device=device,
            file=Path(settings.endpoints.rank_store),
            address=store_address(parallel.dist_init_addr) if parallel.nnodes > 1 else None,
            step_timeout_s=parallel.dist_timeout,
            start_timeout_s=config.server.startup_timeout,
            sends_host_memory=parallel.pp > 1,
        )
    )
    child.beat_while(lambda: group.waiting)
    logger.info("joined rank=%d of=%d device=%s", settings.rank, parallel.num_ranks, device)
    if parallel.nnodes > 1:
        source = settings.source
        check_weights(group, Path(source.path), config.model.load_format, source.tower)
    max_bytes = parallel.one_shot_all_reduce_kib << 10
    if parallel.pp == 1:
        return Place(with_one_shot_sums(group, group.torch_group, max_bytes, device), device)
    stage = stage_of(settings.spec, parallel, settings.rank)
    logger.info("pipeline stage=%d of=%d layers=%d..%d", stage.index, stage.count, stage.first, stage.end - 1)
    own = StageGroup(group, parallel.tp)
    return Place(with_one_shot_sums(own, own.torch_group, max_bytes, device), device, TorchWire(group, stage))


def check_weights(group: TorchGroup, path: Path, load_format: str, tower: str = "") -> None:
    """Check before loading that all machines have the same weights.

    Raises:
        ConfigError: the weights differ.
        RankLostError: a rank is gone.
    """
    try:
        differing = group.differing("weight files", weights_fingerprint(path, load_format, tower))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if differing:
        ranks = " and ".join(map(str, differing))
        raise ConfigError(
            f"the weight files of rank {ranks} are not those of rank 0, although the configurations are equal; copy "
            "one model to all machines"
        )


def store_address(dist_init_addr: str | None) -> tuple[str, int]:
    """Host and port of the store through which ranks of several machines connect."""
    assert dist_init_addr is not None
    host, port = parse_address(dist_init_addr)
    return host, port + STORE


_NUM_PIECES: Final = 8  # of each file: a model of 100 files costs 800 reads
_PIECE_BYTES: Final = 4096


def weights_fingerprint(path: Path, load_format: str, tower: str = "") -> str:
    """Fingerprint of the files that are loaded: their sizes and a few pieces of each; for dummy weights, of the format.

    Two checkpoints of one architecture have equal configurations and shapes. Ranks that load parts of different
    checkpoints would compute wrong results without an error.

    Args:
        path: a folder with safetensors files, or a GGUF file, of a split model the first part.
        tower: the GGUF file of its tower, if it has one.

    Raises:
        ConfigError: files are missing.
        OSError: a file cannot be read.
    """
    digest = blake2b(load_format.encode(), digest_size=16)
    if load_format != "dummy":
        files = parts_of(path) if path.is_file() else weight_files(path)
        for file in [*files, Path(tower)] if tower else files:
            _add_pieces(file, digest)
    return digest.hexdigest()


def _add_pieces(path: Path, digest: blake2b) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        for idx in range(_NUM_PIECES):
            start = max(0, size - _PIECE_BYTES) * idx // (_NUM_PIECES - 1)  # from the header to the end
            digest.update(os.pread(file.fileno(), _PIECE_BYTES, start))
