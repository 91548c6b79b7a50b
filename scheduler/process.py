"""The scheduler process: scheduling, memory accounting, and the model runner of rank 0.

With several ranks it sends each step to the other ranks; see `model_runner/distributed/ranked_runner.py`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..launch.child.child import Child
from ..launch.resolve.host_facts import read_host_facts
from ..launch.resolve.memory_budget import capacity_of
from ..model_runner.assembly import build_facts
from ..model_runner.distributed.join_group import join_group
from ..model_runner.distributed.ranked_runner import OtherRanks, RankedAdapters, RankedRunner
from ..model_runner.distributed.staged_runner import StagedRunner
from ..model_runner.load import load_model_runner
from ..models.spec.sizes import GIB
from ..models.tokenizer.tokenizer import load_tokenizer
from ..runtime.config.engine_config import CacheConfig, EngineConfig
from ..runtime.config.kv_event_settings import parse_kv_events, settings_of_replicas
from ..runtime.config.kv_store_address import parse_kv_store
from ..runtime.installation import __version__, cache_dir
from ..runtime.messages import Call, LoadAdapter, SchedulerInput
from ..runtime.step_plan import Runner
from ..runtime.transport.ipc import Inbox, Outbox
from ..runtime.transport.kv_transfer import KVLayout
from .adapters.adapter_table import AdapterReader
from .event_loop import EventLoop, KVThread
from .grammar.grammar_builder import make_grammars
from .journal.flight_recorder import FlightRecorder
from .journal.recorder import make_recorder, open_log
from .kv_events.publisher import KVEventPublisher
from .kv_stores.identity import kv_facts, weights_content
from .kv_stores.page_mover import PageMover, PageRows
from .kv_stores.page_store import PageStore
from .kv_stores.ranked_rows import RankedRows
from .kv_stores.segment_store import SegmentStore, check_folder
from .preemption.chaos import with_chaos
from .prefix_cache.block_events import block_size_for
from .records.stats import StepLog
from .scheduler import Scheduler
from .transfer.link.make_link import make_link
from .transfer.link.ranks import Ranks

if TYPE_CHECKING:
    from ..model_runner.memory.kv_pool import KVPool
    from ..model_runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_AHEAD_SHARE = 16
"""While the process is idle, it faults in at most 1/16 of the free memory as KV memory for later steps, ..."""
_MOST_AHEAD_BYTES = 1 << 30
"""... but no more than this: 45,000 tokens of a model with 23 KB of KV per token."""


def main(child: Child) -> None:
    """Load the model, then schedule until the supervisor requests a stop."""
    settings = child.settings
    config, spec = settings.config, settings.spec
    decoder: msgspec.msgpack.Decoder[SchedulerInput] = msgspec.msgpack.Decoder(SchedulerInput)
    inbox = Inbox(settings.endpoints.scheduler, decoder, wake=child)
    outbox = Outbox(settings.endpoints.detokenizer)

    started_s = time.monotonic()
    # Before the weights: a file or folder that cannot be written fails at once, and not after minutes of loading.
    log = open_log(config)
    tier = _check_tier(config.cache)
    kv_events = _open_kv_events(config, settings.replica)
    place = join_group(child)
    group = place.group
    own_runner = load_model_runner(config, settings.source, spec, capacity_of(config, spec), place)
    capacity, eos_token_ids = own_runner.capacity, frozenset(spec.eos_token_ids)
    grammars = make_grammars(lambda: load_tokenizer(settings.source), capacity.vocab_size, spec.eos_token_ids)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        capacity,
        eos_token_ids,
        matchers=grammars,
        records_blocks=kv_events is not None,
    )
    recorder = make_recorder(
        config, capacity, eos_token_ids, scheduler, wall_s=time.time(), now_s=time.monotonic(), log=log
    )
    if settings.endpoints.black_box:
        recorder = FlightRecorder(recorder, scheduler.decisions, Path(settings.endpoints.black_box))
    runner: Runner = own_runner
    adapters: AdapterReader | None = None if own_runner.adapters is None else own_runner.adapters.store
    if config.parallel.num_ranks > 1:
        others = OtherRanks(settings.endpoints.model_runners, config.parallel)
        others.wait(config.server.startup_timeout)
        runner = RankedRunner(own_runner, others, group)
        if place.wire is not None:
            runner = StagedRunner(own_runner, others, place.wire, group)
        if own_runner.adapters is not None:
            adapters = RankedAdapters(own_runner.adapters.store, others)
    runner = with_chaos(runner, config.scheduler, capacity.page_size)
    transfer: KVThread | None = (
        _make_transfer(child, own_runner.kv_pool)
        if tier is None
        else _open_tier(child, tier, own_runner, lambda: scheduler.settled_step)
    )
    # The objects that exist now stay, so the collector must not visit them in the middle of a step.
    gc.collect()
    gc.freeze()
    gc.enable()

    step_log = StepLog(config.log.log_interval)
    overlap = config.scheduler.overlap
    assert overlap != "auto", "the configuration is not resolved"
    loop = EventLoop(
        scheduler,
        runner,
        inbox,
        outbox,
        Outbox(settings.endpoints.tokenizer_manager),
        child,
        step_log,
        recorder=recorder,
        idle_work=_idle_work(own_runner.kv_pool),
        overlap=overlap,
        grammars=grammars,
        adapters=adapters,
        kv_events=kv_events,
        transfer=transfer,
        drain_timeout_s=config.server.drain_timeout,
        replica=settings.replica,
    )
    for adapter in settings.adapters:
        loop.handle(Call(0, LoadAdapter(adapter.store_id, adapter.spec)))
    if not settings.life:  # later, one that cannot be read any more fails its own requests
        loop.finish_reads()
    group.meet("loaded")  # so the first step's collective operations do not wait for ranks that still load
    if kv_events is not None:
        kv_events.clear()
    load_s = f"{time.monotonic() - started_s:.2f}"
    child.ready(capacity=capacity, load_s=load_s, **build_facts(own_runner))
    loop.run()


def _open_kv_events(config: EngineConfig, replica: int) -> KVEventPublisher | None:
    """Bind the sockets of `--kv-events`. Subscribers have the time of loading to connect (again)."""
    settings = parse_kv_events(config.server.kv_events, config.server.kv_events_replay)
    if settings is None:
        return None
    block_size = block_size_for(config.cache.page_size)
    settings = settings_of_replicas(settings, config.parallel.dp)[replica]
    publisher = KVEventPublisher(settings, block_size, replica)
    logger.info("publishing kv events block_size=%d at %s", block_size, " ".join(publisher.endpoints))
    return publisher


def _make_transfer(child: Child, pool: KVPool) -> KVThread | None:
    settings = child.settings
    config = settings.config
    if config.scheduler.disaggregation_mode == "null":
        return None
    from ..model_runner.distributed.join_group import weights_fingerprint
    from ..model_runner.memory.page_memory import PageMemory

    memory = PageMemory(pool.views)
    weights = weights_fingerprint(Path(settings.source.path), config.model.load_format)
    model = blake2b(msgspec.json.encode(settings.spec), digest_size=16).hexdigest()
    layout = KVLayout(__version__, weights, pool.page_size, memory.tensors, config.parallel.tp, model)
    vocab_size = settings.spec.vocab_size
    return make_link(config, memory, layout, settings.endpoints, life=settings.life, vocab_size=vocab_size)


class _Tier(NamedTuple):
    """How the tier of the prefix cache is opened, and the file that remembers the digests of weights."""

    open: Callable[[bytes, Mapping[str, Any]], PageStore]
    memo: Path


def _check_tier(cache: CacheConfig) -> _Tier | None:
    """Try the folder of `--kv-disk` or the server of `--kv-store`.

    Raises:
        ConfigError: it cannot be used.
    """
    if cache.kv_disk is not None:
        root, limit_bytes = Path(cache.kv_disk).expanduser(), int(cache.kv_disk_size * GIB)
        check_folder(root, limit_bytes)
        return _Tier(
            lambda identity, facts: SegmentStore(root, identity, facts, limit_bytes), root / "weights.json"
        )
    if cache.kv_store is None:
        return None
    from .kv_stores.remote_store import RemoteStore, Seal, open_client, read_key

    address = parse_kv_store(cache.kv_store)
    seal = None if cache.kv_store_key is None else Seal(read_key(Path(cache.kv_store_key).expanduser()))
    client = open_client(address)
    memo = cache_dir() / "kv_store" / "weights.json"
    with contextlib.suppress(OSError):  # then the weights are read at each start
        memo.parent.mkdir(parents=True, exist_ok=True)
    return _Tier(lambda identity, _facts: RemoteStore(address, identity, client, seal), memo)


def _open_tier(child: Child, tier: _Tier, runner: ModelRunner, settled_step: Callable[[], int]) -> PageMover:
    """Open the tier of all ranks; raises `RankLostError` if one has not come in time."""
    from ..model_runner.memory.page_memory import PageMemory

    settings = child.settings
    config = settings.config
    own, capacity = PageMemory(runner.kv_pool.views), runner.capacity
    own_states = None if runner.state_pool is None else PageMemory(runner.state_pool.checkpoint_views)
    memory: PageRows = own
    states: PageRows | None = own_states
    tensors = [*own.tensors, *(() if own_states is None else own_states.tensors)]
    if config.parallel.num_ranks > 1:
        ranks = Ranks(settings.endpoints.kv_transfer, config.parallel.num_ranks, settings.life)
        ranks.wait(config.server.startup_timeout)
        tensors += [each for worker in ranks.workers for each in (*worker.tensors, *worker.states)]
        memory = RankedRows(own, ranks, settled_step)
        if own_states is not None:
            states = RankedRows(own_states, ranks, settled_step, states=True)
    facts = kv_facts(
        config,
        settings.spec,
        tensors,
        max_model_len=capacity.max_model_len,
        build=build_facts(runner),
    )
    source, load_format, seed = Path(settings.source.path), config.model.load_format, config.model.seed
    return PageMover(
        config.cache.kv_tier_place,
        tier.open,
        facts,
        lambda: weights_content(source, load_format, seed, tier.memo),
        memory,
        page_size=capacity.page_size,
        scheduler=settings.endpoints.scheduler,
        states=states,
        persist_salted=config.cache.kv_persist_salted,
    )


def _idle_work(kv_pool: KVPool) -> Callable[[int], bool]:
    """Work for times without requests; see `EventLoop`. It is bounded, because other processes need memory, too."""
    if kv_pool.k[0].device.type != "cpu":
        return lambda page: False
    ahead_bytes = min(read_host_facts().mem_usable_bytes // _AHEAD_SHARE, _MOST_AHEAD_BYTES)
    return lambda page: kv_pool.fault_in_some(page, ahead_bytes)
