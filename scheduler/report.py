"""`report_of`: the figures of a scheduler, for `/metrics`, `/server_info` and the load of the server."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..runtime.scheduler_report import HostFigures, KVFigures, SchedulerReport, SchedulerTotals
from ..runtime.transport.kv_tiers import TierFigures
from .records.verdict import AddReqResult

if TYPE_CHECKING:
    from ..runtime.feasibility import Capacity
    from .assembly import SchedulerParts
    from .pass_state import PassState
    from .requests.requests import Requests


def report_of(
    parts: SchedulerParts, capacity: Capacity, last_pass: PassState | None, now_s: float
) -> SchedulerReport:
    """The current figures, and the totals since the start.

    Args:
        parts: of the scheduler.
        capacity: of its runner.
        last_pass: the last one in which there was something to decide.
        now_s: the time of the report.
    """
    requests, stats, memory, page_size = parts.requests, parts.stats, parts.memory, capacity.page_size
    kv, host = memory.kv, memory.host
    figures = parts.transfer.figures()
    tiers = parts.transfer.tier_figures()
    if host.keeps_evicted:
        page_bytes = page_size * capacity.kv_token_bytes
        tiers["host"] = TierFigures(
            lookups=host.lookups_total,
            loaded_tokens=host.hit_pages_total * page_size,
            loaded_bytes=host.hit_pages_total * page_bytes,
            stored_bytes=host.cached_pages_total * page_bytes,
            used_bytes=host.num_cached * page_bytes,
        )
    return SchedulerReport(
        sent_s=now_s,
        num_running_reqs=requests.num_with_row,
        num_queue_reqs=requests.num_waiting + len(requests.receiving),
        num_swapped_reqs=len(requests.swapped),
        num_grammar_reqs=len(requests.grammar),
        num_background_queue_reqs=len(requests.background),
        num_background_running_reqs=len(requests.background_with_row),
        num_queue_tokens=requests.num_waiting_tokens,
        new_token_ratio=parts.estimator.current,
        pinned_tokens=kv.pinned_pages * page_size,
        policy=parts.policy.active_name,
        waiting_by_reason=_waiting_by_reason(requests, last_pass),
        stalled=parts.sentinel.stalled,
        paused=parts.pauses.mode or "",
        num_adapters=len(parts.adapters),
        num_adapter_slots_used=parts.adapter_slots.num_in_use,
        kv=KVFigures(
            used_tokens=kv.held_pages * page_size,
            cached_tokens=kv.cached_pages * page_size,
            total_tokens=capacity.max_total_tokens,
        ),
        host=HostFigures(
            used_tokens=host.num_swapped * page_size,
            total_tokens=host.num_pages * page_size,
        ),
        encoder=parts.encoder_cache.figures,
        totals=SchedulerTotals(
            retracted_reqs=stats.retracted_reqs,
            preempted_reqs=stats.preempted_reqs,
            timed_out_reqs=stats.timed_out_reqs,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            cached_tokens=stats.cached_tokens,
            evicted_tokens=kv.evicted_pages_total * page_size,
            swapped_out_tokens=host.swapped_out_pages_total * page_size,
            swapped_in_tokens=host.swapped_in_pages_total * page_size,
            num_steps=stats.num_steps,
            step_s=stats.step_s / capacity.num_stages,  # a step is computed by all of them
            draft_tokens=stats.draft_tokens,
            accepted_draft_tokens=stats.accepted_draft_tokens,
            overruled_tokens=stats.overruled_tokens,
            encoder_tiles=parts.encoder_cache.encoded_total,
            encoder_hits=parts.encoder_cache.hits_total,
            encoder_s=stats.encode_s,
            prompt_host_tokens=stats.prompt_host_tokens,
            prompt_tier_tokens=stats.prompt_tier_tokens,
            prompt_received_tokens=stats.prompt_received_tokens,
        ),
        transfer=figures and replace(figures, page_bytes=page_size * capacity.kv_token_bytes),
        num_sessions=kv.num_sessions,
        session_turns=dict(kv.session_turns),
        residency=kv.residency(),
        tiers=tiers,
        drafts=stats.drafts.checked(),
        accepted_drafts=stats.drafts.accepted(),
    )


def _waiting_by_reason(requests: Requests, last_pass: PassState | None) -> dict[str, int]:
    """The number of waiting requests per reason, as of the last pass."""
    if not requests.num_waiting or last_pass is None:
        return {}
    refused = (each for each in last_pass.verdicts if each.result is not AddReqResult.CONTINUE)
    reasons = Counter(str(verdict.reason) for verdict in refused)
    if last_pass.rest_reason is not None:
        reasons[str(last_pass.rest_reason)] += last_pass.num_rest
    if last_pass.num_grammar:
        reasons["grammar_pending"] += last_pass.num_grammar
    return dict(reasons)
