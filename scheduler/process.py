"""The scheduler process: scheduling, memory accounting, and the model runner of rank 0.

With several ranks it sends each step to the other ranks; see `model_runner/distributed/ranked_runner.py`.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..launch.child.child import Child
from ..launch.resolve.host_facts import read_host_facts
from ..launch.resolve.memory_budget import capacity_of
from ..model_runner.assembly import build_facts
from ..model_runner.distributed.join_group import join_group
from ..model_runner.distributed.ranked_runner import OtherRanks, RankedAdapters, RankedRunner
from ..model_runner.distributed.staged_runner import StagedRunner
from ..model_runner.load import load_model_runner
from ..models.tokenizer.tokenizer import load_tokenizer
from ..runtime.config.engine_config import EngineConfig
from ..runtime.config.kv_event_settings import parse_kv_events, settings_of_replicas
from ..runtime.installation import __version__
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
from .kv_stores.open_tier import check_tier, open_tier
from .preemption.chaos import with_chaos
from .prefix_cache.block_events import block_size_for
from .records.stats import StepLog
from .scheduler import Scheduler
from .transfer.link.make_link import make_link
from .transfer.link.ranks import Ranks

if TYPE_CHECKING:
    from ..model_runner.memory.kv_pool import KVPool

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
    tier = check_tier(config.cache)
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
        else open_tier(
            tier,
            config,
            settings.source,
            spec,
            own_runner,
            lambda: Outbox(settings.endpoints.scheduler),
            _ranks(child),
            scheduler,
        )
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
    source = settings.source
    weights = weights_fingerprint(Path(source.path), config.model.load_format, source.tower)
    model = blake2b(msgspec.json.encode(settings.spec), digest_size=16).hexdigest()
    layout = KVLayout(__version__, weights, pool.page_size, memory.tensors, config.parallel.tp, model)
    vocab_size = settings.spec.vocab_size
    return make_link(config, memory, layout, settings.endpoints, life=settings.life, vocab_size=vocab_size)


def _ranks(child: Child) -> Ranks | None:
    """The link to the pages of the other ranks; raises `RankLostError` if one has not come in time."""
    config = child.settings.config
    if config.parallel.num_ranks == 1:
        return None
    ranks = Ranks(child.settings.endpoints.kv_transfer, config.parallel.num_ranks, child.settings.life)
    ranks.wait(config.server.startup_timeout)
    return ranks


def _idle_work(kv_pool: KVPool) -> Callable[[int], bool]:
    """Work for times without requests; see `EventLoop`. It is bounded, because other processes need memory, too."""
    if kv_pool.k[0].device.type != "cpu":
        return lambda page: False
    ahead_bytes = min(read_host_facts().mem_usable_bytes // _AHEAD_SHARE, _MOST_AHEAD_BYTES)
    return lambda page: kv_pool.fault_in_some(page, ahead_bytes)
