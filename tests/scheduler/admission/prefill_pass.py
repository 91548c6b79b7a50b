"""One pass of a `PrefillAdder` without a scheduler around it: memory is a number of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.runtime.messages import GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.admission.budget import PrefillBudget
from engine.scheduler.admission.prefill_adder import PrefillAdder
from engine.scheduler.estimator import NewTokenRatio
from engine.scheduler.media.encoder_cache import EncoderCache
from engine.scheduler.media.tile_budget import TileBudget
from engine.scheduler.prefix_cache.base import Prefix, PrefixMatch
from engine.scheduler.records.verdict import AddReqResult, Verdict
from engine.scheduler.requests.req import Req
from engine.scheduler.step_size.step_limits import PartialLimits, PartialPrefills


class CountedMemory:
    """What a `PrefillAdder` asks of `KVMemory`; no request has a cached prefix unless `cached_pages` has it."""

    def __init__(self, page_size: int, cached_pages: dict[str, int] | None = None) -> None:
        self.page_size = page_size
        self.cached_pages = cached_pages or {}
        self.locked: dict[str, int] = {}

    def match(self, req: Req) -> PrefixMatch:
        return PrefixMatch(self.cached_pages.get(req.rid, 0))

    def unlocked_pages(self, match: PrefixMatch) -> int:
        return match.num_pages

    def lock(self, req: Req, prefix: Prefix) -> None:
        assert req.rid not in self.locked, "locked twice"
        self.locked[req.rid] = prefix.match.num_pages


def make_req(rid: str, prompt_len: int, max_new_tokens: int = 1, *, ignore_eos: bool = False) -> Req:
    """A request that has just arrived."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, seed=1)
    return Req(GenerateRequest(rid, bytes(4 * prompt_len), sampling), 0, 0.0)


def make_budget(**changes: object) -> PrefillBudget:
    """Plenty of memory, a chunk of 32 tokens, pages of 4."""
    arguments: dict[str, object] = {
        "page_size": 4,
        "available_tokens": 4000,
        "expected_tokens": 0,
        "max_prefill_tokens": 64,
        "chunk_size": 32,
        "num_decodes": 0,
    }
    return PrefillBudget(**(arguments | changes))  # type: ignore[arg-type]


def make_adder(
    budget: PrefillBudget,
    kv: CountedMemory | None = None,
    *,
    limits: PartialLimits | None = None,
    num_prompts: int = 1,
    nothing_runs: bool = False,
    **options: object,
) -> PrefillAdder:
    """An adder with rows enough."""
    partial_prefills = PartialPrefills(
        limits or PartialLimits(),
        page_size=budget.page_size,
        step_tokens=budget.rem_step_tokens,
        num_prompts=num_prompts,
    )
    options.setdefault("estimator", NewTokenRatio(1.0))
    return PrefillAdder(
        kv or CountedMemory(budget.page_size),  # type: ignore[arg-type]
        budget,
        num_free_rows=1000,
        num_running=0 if nothing_runs else 2,
        partial_prefills=partial_prefills,
        tiles=TileBudget(EncoderCache(0, 0), budget.time, budget.page_size),
        **options,  # type: ignore[arg-type]
    )


class Candidate(NamedTuple):
    """A waiting request, and how many tokens behind its cached pages are ready."""

    req: Req
    more_ready: int = 0


def prefix_of(adder: PrefillAdder, req: Req, more_ready: int = 0) -> Prefix:
    """What the cache has, and so many ready tokens behind it."""
    match = adder._kv.match(req)
    return Prefix(match, match.num_pages * adder.budget.page_size + more_ready)


def run_pass(
    adder: PrefillAdder, partial: Sequence[tuple[Req, int]], waiting: Sequence[Candidate]
) -> list[Verdict]:
    """Continue, admit in order, use the leftover; checks that a refusal changes nothing, and returns the verdicts."""
    verdicts = {req.rid: adder.continue_chunk(req, num_computed) for req, num_computed in partial}
    for req, more_ready in waiting:
        if adder.exhausted() is not None:
            break
        prefix = prefix_of(adder, req, more_ready)
        before = (adder.budget.state(), list(adder.chunks))
        verdict = verdicts[req.rid] = adder.add(req, prefix)
        if verdict.result is AddReqResult.CONTINUE:
            continue
        assert (adder.budget.state(), adder.chunks) == before, "a refusal left traces"
        assert adder.add(req, prefix) == verdict, "asked again, it says something else"
        if verdict.result is AddReqResult.OTHER:
            break
    for verdict in adder.use_leftover():
        verdicts[verdict.rid] = verdict
    return list(verdicts.values())
