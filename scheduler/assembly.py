"""`SchedulerParts`: makes the scheduler's parts from the configuration and connects them.

A mechanism that is off is an object that does nothing, so no other part tests whether it is on. Only this module
chooses those objects.
"""

from __future__ import annotations

from ..runtime.config.chaos_spec import parse_chaos
from ..runtime.config.engine_config import CacheConfig, SchedulerConfig
from ..runtime.feasibility import Capacity, pages_for
from .adapters.adapter_slots import AdapterSlots
from .adapters.adapter_table import AdapterTable
from .admission.admission import Admission
from .admission.admission_pass import AdmissionParts
from .admission.budget import Reservations
from .admission.shared_prefixes import ParallelSamples
from .decodes import Decodes
from .estimator import make_estimator
from .grammar.grammar_rules import GrammarDrafts
from .media.encoder_cache import EncoderCache
from .media.media_ids import MediaIds
from .memory.host_pages import HostPages
from .memory.kv_memory import KVMemory, RowMemory
from .memory.ledger import Ledger
from .memory.pages import IncomingPages, PageAllocator, PageSupply
from .memory.req_to_token_pool import ReqToTokenPool
from .memory.state_slots import StateSlots
from .pass_state import StallSentinel
from .pause import Pauses
from .phases import make_phases
from .policy.base import Load, PolicyParts
from .policy.by_class import ByClass
from .policy.make import make_policy
from .preemption.chaos import ChaosRetract
from .preemption.out_of_memory import OutOfMemory
from .preemption.preemption import Preemption, make_preemption_mode
from .prefix_cache.base import PrefixCache
from .prefix_cache.block_events import BlockEvents, BlockRecorder, block_size_for
from .prefix_cache.eviction import EVICTION_RANKS
from .prefix_cache.radix_cache import RadixCache
from .prefix_cache.tier_pages import CopyOut
from .queries.calls import Calls
from .records.decision_log import DecisionLog
from .records.stats import SchedulerStats
from .requests.deadlines import Deadlines
from .requests.outputs import Answers, StopRules
from .requests.requests import Requests
from .requests.row_states import RowStates
from .results import ResultSettler
from .speculation.multi_step import MultiStepDecode
from .speculation.speculation import make_speculation
from .step_size.background_share import BackgroundShare
from .step_size.step_limits import StepCaps, StepLimits
from .step_size.step_target import StepTarget
from .tiers.page_tier import PageTier
from .tiers.prompt_stores import STORED_FIRST_SHARE
from .transfer.decode_role import DecodeRole
from .transfer.prefill_role import PrefillRole
from .transfer.role import TransferRole


class SchedulerParts:
    """The parts of a scheduler, made and connected; the module of each part describes it."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        capacity: Capacity,
        eos_token_ids: frozenset[int],
        decisions: DecisionLog,
        *,
        streams: bool = True,
        records_blocks: bool = False,
    ) -> None:
        """Make all parts. The arguments are those of `Scheduler`."""
        page_size, num_rows = capacity.page_size, capacity.max_running_requests
        self.stats, self.answers = SchedulerStats(), Answers()
        allocator = PageAllocator(capacity.num_pages)
        pool = ReqToTokenPool(num_rows, pages_for(capacity.max_model_len, page_size), page_size)
        states = RowStates(num_rows, capacity.max_model_len)
        host = HostPages(
            capacity.num_host_pages,
            keeps_evicted=cache.kv_host_size > 0,
            page_bytes=page_size * capacity.kv_token_bytes,
        )
        max_pinned_pages = int(cache.pin_fraction * capacity.num_pages)
        state_slots = _make_state_slots(capacity)
        self.media_ids = MediaIds(capacity)
        self.block_events: BlockRecorder = BlockRecorder()
        if records_blocks:
            ids = self.media_ids
            self.block_events = BlockEvents(block_size_for(page_size), ids.portable, ids.ordinary)
        copy_out = host.cache if host.keeps_evicted else None
        prefix_cache = _make_prefix_cache(
            cache, capacity, max_pinned_pages, state_slots, self.block_events, copy_out
        )
        supply = PageSupply(allocator, prefix_cache)
        incoming = IncomingPages(supply, prefix_cache)
        lookahead = config.num_lookahead_tokens
        kv = KVMemory(
            supply, pool, states, prefix_cache, host, num_lookahead_tokens=lookahead, state_slots=state_slots
        )
        self.memory = memory = RowMemory(states, pool, kv, host)
        self.ledger = Ledger(allocator, prefix_cache, memory, incoming)

        def load() -> Load:
            taken = (kv.num_pages - kv.available_pages) / kv.num_pages
            num_running = num_rows - pool.num_free_rows - len(self.requests.background_with_row)
            return Load(num_running, num_rows, taken)

        self.policy = policy = make_policy(config, PolicyParts(kv.known_matches, page_size, load))
        self.by_class = by_class = ByClass(policy, page_size)
        parallel_samples = ParallelSamples(states)
        self.adapters = AdapterTable(is_enabled=capacity.num_adapter_slots > 0)
        self.adapter_slots = AdapterSlots(capacity.num_adapter_slots, self.adapters)
        self.encoder_cache = EncoderCache(
            capacity.num_encoder_rows, capacity.encoder_tile_rows, capacity.encoder_tile_parts
        )
        limits = StepLimits.of(config)
        caps = StepCaps(limits, page_size=page_size, num_rows=num_rows, max_model_len=capacity.max_model_len)
        self.grammar_drafts = GrammarDrafts(states)
        self.speculation = make_speculation(
            config,
            limits,
            memory=memory,
            caps=caps,
            grammar_drafts=self.grammar_drafts,
            keeps_states=state_slots is not None,
        )
        self.requests = requests = Requests(
            kv, by_class, (parallel_samples, self.adapter_slots, self.encoder_cache, self.speculation)
        )
        mode = make_preemption_mode(config.preemption_mode, page_size * capacity.kv_token_bytes)
        preemption = Preemption(
            requests,
            mode,
            memory=memory,
            stats=self.stats,
            priority_threshold=config.priority_preemption_threshold,
        )
        self.estimator = estimator = make_estimator(config, page_size)
        self.target = target = StepTarget(limits.target_step_ms / 1000, capacity.encoder_tile_parts)
        share = BackgroundShare(target, config.batch_slowdown, requests, memory)
        self.out_of_memory = OutOfMemory(requests, preemption, caps)
        self.pauses = Pauses(requests, preemption)
        reservations = Reservations(requests, states, estimator, page_size)
        admission = Admission(
            AdmissionParts(
                requests=requests,
                queue=requests.waiting,
                swapped=requests.swapped,
                policy=policy,
                preemption=preemption,
                pauses=self.pauses,
                reservations=reservations,
                parallel_samples=parallel_samples,
                adapter_slots=self.adapter_slots,
                encoder_cache=self.encoder_cache,
                memory=memory,
                look_ahead=limits.look_ahead,
            ),
            by_class.background,
            limits,
            caps=caps,
            target=target,
            estimator=estimator,
            dedups_prefixes=cache.radix_cache and config.in_batch_prefix_caching,
            stats=self.stats,
        )
        decodes = Decodes(
            requests,
            preemption,
            memory=memory,
            incoming=incoming,
            estimator=estimator,
            chaos=ChaosRetract(parse_chaos(config.chaos), config.policy_seed),
            answers=self.answers,
            policy=policy,
            num_stages=capacity.num_stages,
        )
        self.phases = make_phases(
            config, admission, decodes, requests, share, self.out_of_memory, self.pauses
        )
        stop_rules = StopRules(eos_token_ids, capacity.vocab_size)
        self.multi_step = MultiStepDecode(
            requests,
            max_duration_s=limits.multi_step_ms / 1000,
            memory=memory,
            caps=caps,
            stop_rules=stop_rules,
        )
        self.settler = ResultSettler(
            requests,
            memory=memory,
            stop_rules=stop_rules,
            caps=caps,
            out_of_memory=self.out_of_memory,
            estimator=estimator,
            mode=mode,
            policy=by_class,
            target=target,
            share=share,
            speculation=self.speculation,
            multi_step=self.multi_step,
            stats=self.stats,
            streams=streams,
        )
        self.deadlines = Deadlines(config.queue_timeout, config.request_timeout)
        self.sentinel = StallSentinel()
        self.calls = Calls(
            kv,
            prefix_cache,
            requests,
            decisions,
            adapters=self.adapters,
            adapter_slots=self.adapter_slots,
            pauses=self.pauses,
            max_pinned_tokens=max_pinned_pages * page_size,
        )
        self.transfer = _make_transfer(
            config,
            requests,
            prefix_cache,
            memory,
            supply,
            incoming,
            reservations=reservations,
            stop_rules=stop_rules,
            stats=self.stats,
            by_priority=policy.by_priority,
            settings=cache,
        )


def _make_transfer(
    config: SchedulerConfig,
    requests: Requests,
    cache: PrefixCache,
    memory: RowMemory,
    supply: PageSupply,
    incoming: IncomingPages,
    *,
    reservations: Reservations,
    stop_rules: StopRules,
    stats: SchedulerStats,
    by_priority: bool,
    settings: CacheConfig,
) -> TransferRole:
    if settings.kv_tier:
        return PageTier(
            requests,
            cache,
            memory.kv,
            incoming,
            reservations,
            settings,
            num_rows=memory.pool.num_rows,
            by_priority=by_priority,
        )
    timeout_s = config.disaggregation_timeout
    match config.disaggregation_mode:
        case "prefill":
            return PrefillRole(cache, supply, memory.kv.page_size, timeout_s=timeout_s)
        case "decode":
            return DecodeRole(
                requests,
                cache,
                memory.kv,
                incoming,
                reservations=reservations,
                stop_rules=stop_rules,
                stats=stats,
                max_open=memory.pool.num_rows,
                timeout_s=timeout_s,
                fallback=config.disaggregation_fallback,
                by_priority=by_priority,
            )
        case "null" | "both":  # of both, each replica has its own mode
            return TransferRole()


def _make_state_slots(capacity: Capacity) -> StateSlots | None:
    """None: the model has no state layers."""
    if not capacity.checkpoint_pages:
        return None
    return StateSlots(
        capacity.num_checkpoints, interval_pages=capacity.checkpoint_pages, page_size=capacity.page_size
    )


def _make_prefix_cache(
    cache: CacheConfig,
    capacity: Capacity,
    max_pinned_pages: int,
    state_slots: StateSlots | None,
    blocks: BlockRecorder,
    copy_out: CopyOut | None,
) -> PrefixCache:
    if not cache.radix_cache:
        return PrefixCache()
    stores_ahead = cache.kv_tier and cache.kv_write == "evicted"
    radix = RadixCache(
        capacity.page_size,
        eviction=EVICTION_RANKS[cache.eviction_policy],
        max_pinned_pages=max_pinned_pages,
        free_checkpoint=None if state_slots is None else state_slots.free,
        blocks=blocks,
        stored_window_pages=capacity.num_pages // STORED_FIRST_SHARE if stores_ahead else 0,
        copy_out=copy_out,
    )
    if state_slots is not None:
        state_slots.connect(radix.drop_oldest_checkpoint)
    return radix
