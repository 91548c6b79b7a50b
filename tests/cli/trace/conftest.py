"""Records as a small engine would leave them, and files of them.

`SampleEngine` is not the product's scheduler: its rules are as simple as can be, so that thousands of requests take a
second and each kind of event is sure to be there: a queue, a KV pool that runs out, chunks, retractions, swaps, hits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import FinishKind
from engine.runtime.step_plan import ForwardMode
from engine.scheduler.journal.log_file import Header
from engine.scheduler.journal.log_writer import LogWriter
from engine.scheduler.records.decision_log import (
    Arrived,
    BudgetState,
    DecisionRecord,
    Finished,
    PageCounts,
    PassRecord,
    Retraction,
    Settled,
)
from engine.scheduler.records.verdict import AddReqResult, CacheMiss, MissKind, Reason, Verdict

LOOK_AHEAD = 6
PAGE_SIZE = 16
START_S = 1000.0


@dataclass
class _Request:
    rid: str
    prompt_len: int
    max_new_tokens: int
    cached_len: int
    computed: int = 0
    output_len: int = 0
    pages: int = 0
    on_host: bool = False
    end: FinishKind = FinishKind.LENGTH


@dataclass
class SampleEngine:
    """`records` plays one run."""

    num_requests: int = 24
    num_pages: int = 320
    max_running: int = 12
    chunk_size: int = 256
    requests_per_s: float = 12.0
    output_len: tuple[int, int] = (12, 90)
    prompt_len: tuple[int, int] = (40, 700)
    prefill_alone: bool = False
    seed: int = 1
    _now_s: float = START_S
    _waiting: deque[_Request] = field(default_factory=deque)
    _partial: _Request | None = None
    _running: list[_Request] = field(default_factory=list)
    _cached: int = 0
    _held: int = 0
    _num_retracted: int = 0

    def records(self) -> Iterator[DecisionRecord]:
        rng = random.Random(self.seed)
        arrivals = self._arrivals(rng)
        upcoming = next(arrivals, None)
        step_id = 0
        while upcoming or self._waiting or self._running or self._partial:
            if not (self._waiting or self._running or self._partial):
                assert upcoming is not None
                self._now_s = max(self._now_s, upcoming[0])
            while upcoming and upcoming[0] <= self._now_s:
                request = upcoming[1]
                self._waiting.append(request)
                yield Arrived(
                    upcoming[0],
                    request.rid,
                    request.prompt_len,
                    request.max_new_tokens,
                    tenant="acme" if step_id % 3 else "",
                )
                upcoming = next(arrivals, None)
            step_id += 1
            record, decodes, prefill, done = self._pass(step_id, rng)
            yield record
            forward_s = 0.004 + 0.00003 * prefill + 0.0002 * decodes
            self._now_s += forward_s + 0.0008
            yield Settled(
                self._now_s, step_id, forward_s, left=self._settle(record.mode, done), next_token_ids=b""
            )

    def _arrivals(self, rng: random.Random) -> Iterator[tuple[float, _Request]]:
        at = self._now_s
        for idx in range(self.num_requests):
            at += rng.expovariate(self.requests_per_s) * (0.3 if idx % 40 < 25 else 2.2)
            prompt_len = rng.randint(*self.prompt_len)
            cached = rng.choice((0, 0, prompt_len // 2)) // PAGE_SIZE * PAGE_SIZE
            end = FinishKind.ABORT if idx % 23 == 9 else rng.choice((FinishKind.STOP, FinishKind.LENGTH))
            rid = f"gen-{rng.getrandbits(48):012x}-{idx}"
            yield at, _Request(rid, prompt_len, rng.randint(*self.output_len), cached, end=end)

    def _pass(self, step_id: int, rng: random.Random) -> tuple[PassRecord, int, int, list[_Request]]:
        record = PassRecord(self._now_s, step_id, policy="lpm" if len(self._waiting) < 20 else "fcfs")
        self._make_room(record, rng)
        self._evict(record)
        record.num_waiting = len(self._waiting)
        free = self.num_pages - self._held
        before = BudgetState(free * PAGE_SIZE, free * PAGE_SIZE, 4096, self.chunk_size)
        budget, done = self.chunk_size, []
        if self._partial:
            request, rest = self._partial, self._partial.prompt_len - self._partial.computed
            length = min(rest, budget)
            record.continued.append(
                Verdict(
                    request.rid,
                    AddReqResult.CONTINUE,
                    Reason.CHUNK_CONTINUED,
                    request.computed,
                    length,
                    0,
                    rest,
                    budget,
                )
            )
            budget -= length
            request.computed += length
            if length == rest:
                self._partial = None
                done.append(request)
        budget = self._admit(record, budget, done)
        record.budget_before = before
        free = self.num_pages - self._held
        record.budget_after = BudgetState(free * PAGE_SIZE, free * PAGE_SIZE, 4096, budget)
        prefill = self.chunk_size - budget
        alone = self.prefill_alone and prefill > 0
        decodes = 0 if alone else len(self._running)
        record.num_decodes = decodes
        record.mode = (
            (ForwardMode.MIXED if decodes else ForwardMode.EXTEND)
            if prefill
            else ForwardMode.DECODE
            if decodes
            else ForwardMode.IDLE
        )
        for request in self._running if decodes else ():
            request.output_len += 1
            grown = -(-(request.prompt_len + request.output_len) // PAGE_SIZE) - request.pages
            request.pages += grown
            self._held += grown
        record.num_running = len(self._running) + len(done) + (self._partial is not None)
        locked = min(self._cached // 3, self.num_pages - self._held)
        evictable = min(self._cached - locked, self.num_pages - self._held - locked)
        record.pages = PageCounts(
            self.num_pages - self._held - locked - evictable, evictable, locked, self._held
        )
        if record.retractions and self._num_retracted % 4 == 0:
            record.notes.append("new-token ratio raised to 0.61 after retraction")
        return record, decodes, prefill, done

    def _admit(self, record: PassRecord, budget: int, done: list[_Request]) -> int:
        refused = 0
        for request in list(self._waiting):
            if len(self._running) + len(done) + (self._partial is not None) >= self.max_running:
                refuse_rest(record, Reason.NO_ROW)
                break
            if budget <= 0:
                refuse_rest(record, Reason.CHUNK_BUDGET)
                break
            if record.retractions:
                refuse_rest(record, Reason.RETRACTING)
                break
            if refused >= LOOK_AHEAD:
                refuse_rest(record, Reason.LOOK_AHEAD_SPENT, request.rid)
                break
            prefix = request.computed if request.on_host else request.cached_len
            extend = request.prompt_len - prefix
            need = request.prompt_len + request.max_new_tokens // 2 + PAGE_SIZE
            have = (self.num_pages - self._held) * PAGE_SIZE
            facts = (prefix, extend, request.max_new_tokens // 2, need, have)
            if need >= have and (self._running or self._partial or done):
                refused += 1
                record.verdicts.append(Verdict(request.rid, AddReqResult.NO_TOKEN, Reason.NO_KV, *facts))
                continue
            if request.prompt_len % 7 == 0 and record.step_id % 5:
                record.verdicts.append(Verdict(request.rid, AddReqResult.SKIP, Reason.PREFIX_COMING, *facts))
                continue
            if self._partial:
                record.verdicts.append(Verdict(request.rid, AddReqResult.OTHER, Reason.PARTIAL_LIMIT, *facts))
                refuse_rest(record, Reason.BEHIND, request.rid)
                break
            length = min(extend, budget)
            budget -= length
            reason = (
                Reason.SWAPPED_IN
                if request.on_host
                else Reason.ADMITTED
                if length == extend
                else Reason.CHUNKED
            )
            facts = (prefix, length, request.max_new_tokens // 2, need, have)
            record.verdicts.append(Verdict(request.rid, AddReqResult.CONTINUE, reason, *facts))
            if not request.on_host:
                kind = MissKind.NO_PREFIX if not prefix else MissKind.DIFFERS
                record.cache_misses.append(
                    CacheMiss(request.rid, request.prompt_len, prefix, kind, prefix + 3)
                )
            request.on_host = False
            self._waiting.remove(request)
            request.computed = prefix + length
            request.pages = -(-request.prompt_len // PAGE_SIZE)
            self._held += request.pages
            self._cached = min(self._cached + request.pages // 2, self.num_pages // 2)
            if length == extend:
                done.append(request)
            else:
                self._partial = request
        return budget

    def _make_room(self, record: PassRecord, rng: random.Random) -> None:
        while len(self._running) > 1 and self._held + len(self._running) > self.num_pages:
            victim = min(self._running, key=lambda each: each.output_len)
            self._running.remove(victim)
            self._num_retracted += 1
            mode = "swap" if rng.random() < 0.4 else "recompute"
            record.retractions.append(Retraction(victim.rid, mode, "memory", victim.pages, victim.output_len))
            self._held -= victim.pages
            victim.pages = 0
            victim.on_host = mode == "swap"
            victim.computed = victim.prompt_len - 1 if victim.on_host else 0
            self._waiting.appendleft(victim)
        record.gave_memory_back = bool(record.retractions)

    def _evict(self, record: PassRecord) -> None:
        excess = self._held + self._cached - self.num_pages
        if excess > 0:
            record.evicted_pages = min(excess, self._cached)
            self._cached -= record.evicted_pages

    def _settle(self, mode: ForwardMode, done: list[_Request]) -> list[Finished]:
        left = []
        if mode is not ForwardMode.EXTEND:
            for request in list(self._running):
                if request.end is FinishKind.ABORT and request.output_len >= request.max_new_tokens // 2:
                    left.append(
                        Finished(
                            request.rid, FinishKind.ABORT, request.output_len, "the client closed the stream"
                        )
                    )
                elif request.output_len >= request.max_new_tokens:
                    left.append(Finished(request.rid, request.end, request.output_len))
                else:
                    continue
                self._running.remove(request)
                self._held -= request.pages
        self._running += done
        return left


def refuse_rest(record: PassRecord, reason: Reason, behind: str = "") -> None:
    """Give all waiting requests of a pass that have no verdict yet this one."""
    record.num_rest = record.num_waiting - record.num_grammar - len(record.verdicts)
    if record.num_rest:
        record.rest_reason, record.rest_behind = reason, behind


@pytest.fixture
def sample_engine() -> type[SampleEngine]:
    """`SampleEngine(**settings).records()`: the records of a run."""
    return SampleEngine


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """Write a decision log with one run for each list of records."""

    def write(*runs: Iterable[DecisionRecord], name: str = "decisions.log") -> Path:
        path = tmp_path / name
        for records in runs:
            header = Header(
                engine_version="1.0",
                wall_s=1.79e9,
                now_s=START_S,
                scheduler=asdict(SchedulerConfig()),
                cache=asdict(CacheConfig()),
                capacity=Capacity(2048, 320, PAGE_SIZE, 12, 1000),
                eos_token_ids=[0],
                model="tiny",
                device="cpu",
            )
            writer = LogWriter(path, header)
            for record in records:
                writer.add(record)
            writer.close()
        return path

    return write
