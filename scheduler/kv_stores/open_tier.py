"""The tier of the prefix cache of an engine: its store by the settings, and the thread that moves pages there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...models.spec.sizes import GIB
from ...runtime.config.engine_config import CacheConfig, EngineConfig
from ...runtime.config.kv_store_address import parse_kv_store
from ...runtime.installation import cache_dir
from .identity import kv_facts, weights_content
from .page_mover import NewsOutbox, PageMover, PageRows
from .page_store import PageStore
from .ranked_rows import RankedRows
from .segment_store import SegmentStore, check_folder

if TYPE_CHECKING:
    from ...model_runner.model_runner import ModelRunner
    from ...models.source import ModelSource
    from ...models.spec.model_spec import ModelSpec
    from ..scheduler import Scheduler
    from ..transfer.link.ranks import Ranks


logger = logging.getLogger(__name__)


class Tier(NamedTuple):
    """A tier of the prefix cache: `open` gives its store, `memo` is the file with the digests of weights."""

    open: Callable[[bytes, Mapping[str, Any]], PageStore]
    memo: Path


def check_tier(cache: CacheConfig) -> Tier | None:
    """Try the folder of `--kv-disk` or the server of `--kv-store`.

    Raises:
        ConfigError: it cannot be used.
    """
    if cache.kv_disk is not None:
        root, limit_bytes = Path(cache.kv_disk).expanduser(), int(cache.kv_disk_size * GIB)
        check_folder(root, limit_bytes)
        return Tier(
            lambda identity, facts: SegmentStore(root, identity, facts, limit_bytes), root / "weights.json"
        )
    if cache.kv_store is None:
        return None
    from .remote_store import RemoteStore, Seal, open_client, read_key

    address = parse_kv_store(cache.kv_store)
    seal = None if cache.kv_store_key is None else Seal(read_key(Path(cache.kv_store_key).expanduser()))
    client = open_client(address)
    if address.scheme == "mooncake" and seal is None:
        logger.warning(
            "%s: its master may place prompts' KV in the memory of other machines, without encryption; encrypt it "
            "with --kv-store-key",
            address,
        )
    memo = cache_dir() / "kv_store" / "weights.json"
    with contextlib.suppress(OSError):  # then the weights are read at each start
        memo.parent.mkdir(parents=True, exist_ok=True)
    return Tier(lambda identity, _facts: RemoteStore(address, identity, client, seal), memo)


def open_tier(
    tier: Tier,
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    runner: ModelRunner,
    open_outbox: Callable[[], NewsOutbox],
    ranks: Ranks | None,
    scheduler: Scheduler,
) -> PageMover:
    """Start the thread.

    Args:
        runner: of rank 0.
        open_outbox: see `PageMover`.
        ranks: the other ones; None: there are none.
        scheduler: its settled steps, and its images.
    """
    from ...model_runner.assembly import build_facts
    from ...model_runner.memory.page_memory import PageMemory

    own, capacity = PageMemory(runner.kv_pool.views), runner.capacity
    own_states = None if runner.state_pool is None else PageMemory(runner.state_pool.checkpoint_views)
    memory: PageRows = own
    states: PageRows | None = own_states
    tensors = [*own.tensors, *(() if own_states is None else own_states.tensors)]
    if ranks is not None:
        tensors += [each for worker in ranks.workers for each in (*worker.tensors, *worker.states)]
        memory = RankedRows(own, ranks, lambda: scheduler.settled_step)
        if own_states is not None:
            states = RankedRows(own_states, ranks, lambda: scheduler.settled_step, states=True)
    facts = kv_facts(config, spec, tensors, max_model_len=capacity.max_model_len, build=build_facts(runner))
    path, load_format, seed = Path(source.path), config.model.load_format, config.model.seed
    return PageMover(
        config.cache.kv_tier_place,
        tier.open,
        facts,
        lambda: weights_content(path, load_format, seed, tier.memo, source.tower),
        memory,
        page_size=capacity.page_size,
        open_outbox=open_outbox,
        states=states,
        persist_salted=config.cache.kv_persist_salted,
        portable=scheduler.media_ids.portable,
    )
