"""`Model`: a scheduler reduced to what policies see of it. A step takes a second.

It calls the hooks as `AdmissionPass`, `Requests` and `Scheduler` do. Outputs have known lengths, prompts are zeros, and
the prefix cache holds what a test says. Memory is promised in full at admission; whoever lacks it may be overtaken
where the policy looks ahead. Requests that a test calls stuck are passed over, as are those that a rule keeps out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from engine.runtime.config.engine_config import SchedulerConfig
from engine.runtime.messages import FinishKind, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.arrays import TOKEN_ID_BYTES
from engine.scheduler.policy.base import Load, PolicyParts
from engine.scheduler.policy.make import make_policy
from engine.scheduler.prefix_cache.base import Lease, PrefixMatch
from engine.scheduler.records.verdict import Reason
from engine.scheduler.requests.req import Chunk, Req, ReqStatus
from engine.scheduler.requests.requests import WaitingQueue

PAGE_SIZE = 4


class TreeNode:
    """A node of a prefix tree."""

    def __init__(self, parent: TreeNode | None) -> None:
        self.parent = parent


def make_req(
    seq: int,
    *,
    prompt_len: int = 8,
    max_new_tokens: int = 8,
    tenant: str = "",
    priority: int = 0,
    arrival_s: float = 1.0,
) -> Req:
    """A waiting request."""
    message = GenerateRequest(
        f"r{seq}",
        bytes(prompt_len * TOKEN_ID_BYTES),
        SamplingParams(max_new_tokens=max_new_tokens),
        arrival_s=arrival_s,
        priority=priority,
        tenant=tenant,
    )
    return Req(message, seq, arrival_s)


class NoMemory:
    """A `RequestMemory` without a cache."""

    def ended(self, req):
        pass

    def enqueued(self, req: Req) -> None: ...

    def dequeued(self, req: Req) -> None: ...

    def release(self, req: Req, *, keep: bool) -> None: ...

    def keep_prompt(self, req: Req, now_s: float) -> None: ...

    def drop_host_pages(self, req: Req) -> None: ...


class Model:
    """See the module.

    Attributes:
        waiting, rows, partial: where requests are; `partial` is the one whose prompt is cut.
        stuck: who may not start, by seq.
        order_of_start: each admission, in order.
        started_s, ended_s: when, by rid.
        served: tenant -> weighted tokens: prompts at admission, outputs as generated.
        reasons: why nobody was admitted, per step; None where somebody might have been.
    """

    def __init__(
        self,
        policy: str,
        *,
        max_rows: int = 4,
        step_tokens: int = 1 << 20,
        kv_tokens: int = 1 << 40,
        weights: tuple[int, int] = (1, 1),
        **config: Any,
    ) -> None:
        self.matches: dict[int, PrefixMatch] = {}
        self.max_rows = max_rows
        self.step_tokens = step_tokens
        self.kv_tokens = kv_tokens
        self.stuck: set[int] = set()
        self.weights = weights
        self.kv_share = 0.0
        parts = PolicyParts(
            lambda reqs: [self.matches.get(req.seq, PrefixMatch()) for req in reqs], PAGE_SIZE, self.load
        )
        self.policy: Any = make_policy(  # what is special about each is tested, too
            SchedulerConfig(schedule_policy=policy, **config),  # type: ignore[arg-type]
            parts,
        )
        self.waiting = WaitingQueue(self.policy, NoMemory())
        self.rows: list[Req] = []
        self.partial: tuple[Req, int] | None = None
        self.now_s = 100.0
        self.output_lens: dict[int, int] = {}
        self.arrived_s: dict[str, float] = {}
        self.started_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.order_of_start: list[Req] = []
        self.served: dict[str, int] = {}
        self.reasons: list[Reason | None] = []
        self._num_arrivals = 0

    def load(self) -> Load:
        return Load(len(self.rows), self.max_rows, self.kv_share)

    # ------------------------------------------------------------ input

    def submit(
        self, prompt_len: int = 8, output_len: int = 4, *, max_new_tokens: int | None = None, **req: Any
    ) -> Req:
        """A request arrives; it will generate `output_len` tokens, which the policy is not told."""
        self._num_arrivals += 1
        made = make_req(
            self._num_arrivals,
            prompt_len=prompt_len,
            max_new_tokens=max_new_tokens or output_len,
            arrival_s=self.now_s,
            **req,
        )
        self.output_lens[made.seq] = output_len
        self.arrived_s[made.rid] = self.now_s
        self.waiting.append(made)
        return made

    def cache(self, req: Req, num_pages: int, node: Any = None, pages_in_node: int = 0) -> None:
        """From now on so much of the request's prompt is cached."""
        self.matches[req.seq] = PrefixMatch(num_pages, node, pages_in_node)

    def abort(self, req: Req) -> None:
        """End a request wherever it is."""
        if req in self.rows:
            self._leave_row(req)
        else:
            self.waiting.remove(req)
        self._finish(req, FinishKind.ABORT)

    def retract(self, req: Req) -> None:
        """Take its row, and queue it again with its output."""
        self._leave_row(req)
        req.num_retractions += 1
        req.fill_ids = bytes((req.prompt_len + req.output_len) * TOKEN_ID_BYTES)
        req.enter(ReqStatus.RETRACTED, self.now_s)
        self.waiting.requeue(req)

    # ------------------------------------------------------------ steps

    def order(self) -> list[Req]:
        """All waiting requests as the policy orders them now."""
        return list(self.policy.order(self.waiting, self.now_s))

    def step(self) -> list[Req]:
        """Plan and compute one step; returns who was admitted."""
        self.now_s += 1.0
        decodes = [req for req in self.rows if req.status is ReqStatus.DECODE]
        chunks = self._plan_chunks()
        admitted = [chunk.req for chunk in chunks if chunk.is_first]
        for chunk in chunks:
            if chunk.is_first:
                self._start(chunk)
            if chunk.is_last:
                chunk.req.enter(ReqStatus.DECODE, self.now_s)
        newest = max((req.seq for req in admitted), default=0)
        for req in self.waiting:
            req.num_overtaken += req.seq < newest
        if chunks or decodes:
            self.policy.planned(chunks, decodes)
        for req in [*decodes, *(chunk.req for chunk in chunks if chunk.is_last)]:
            self._sample(req)
        return admitted

    def run(self, max_steps: int = 100_000) -> float:
        """Step until nothing waits or runs; returns the mean time from arrival to end."""
        for _ in range(max_steps):
            if not (self.waiting or self.rows):
                took_s = [self.ended_s[rid] - self.arrived_s[rid] for rid in self.ended_s]
                return sum(took_s) / max(1, len(took_s))
            self.step()
        raise AssertionError(f"{len(self.waiting)} still wait after {max_steps} steps")

    def run_until(self, done: Callable[[], bool], max_steps: int = 10_000) -> int:
        """Step until something has happened; returns how many steps that took."""
        for num_steps in range(max_steps):
            if done():
                return num_steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def _plan_chunks(self) -> list[Chunk]:
        left = self.step_tokens
        chunks: list[Chunk] = []
        if self.partial is not None:
            req, start = self.partial
            chunks.append(self._chunk(req, start, left, is_first=False))
            left -= chunks[0].length
        reason = self.policy.hold(self.waiting, self.now_s)
        self.reasons.append(reason)
        if reason is not None:
            return chunks
        places = self.max_rows - len(self.rows)
        room = self.kv_tokens - sum(map(_kv_len, self.rows))
        offers = self.policy.max_offers(self.waiting)
        for req in itertools.islice(self.policy.order(self.waiting, self.now_s), offers):
            if places <= 0 or left <= 0 or self.partial is not None:
                break
            if req.seq in self.stuck:
                continue
            if _kv_len(req) > room:
                if self.policy.looks_ahead:
                    continue
                break
            cached_pages = self.matches.get(req.seq, PrefixMatch()).num_pages
            req.lease = Lease("", cached_pages, None)
            chunks.append(self._chunk(req, cached_pages * PAGE_SIZE, left, is_first=True))
            left -= chunks[-1].length
            places -= 1
            room -= _kv_len(req)
        return chunks

    def _chunk(self, req: Req, start: int, left: int, *, is_first: bool) -> Chunk:
        length = min(left, req.fill_len - start)
        is_last = start + length == req.fill_len
        self.partial = None if is_last else (req, start + length)
        return Chunk(req, start, length, is_first, is_last)

    def _start(self, chunk: Chunk) -> None:
        req = chunk.req
        self.waiting.remove(req)
        req.enter(ReqStatus.PREFILL, self.now_s)
        self.rows.append(req)
        self.order_of_start.append(req)
        self.started_s.setdefault(req.rid, self.now_s)
        if not req.num_retractions:
            self._serve(req, (req.fill_len - chunk.start) * self.weights[0])

    def _sample(self, req: Req) -> None:
        req.output_len += 1
        self._serve(req, self.weights[1])
        if req.output_len == self.output_lens[req.seq]:
            self._leave_row(req)
            self._finish(req, FinishKind.STOP)

    def _serve(self, req: Req, tokens: int) -> None:
        self.served[req.tenant] = self.served.get(req.tenant, 0) + tokens

    def _leave_row(self, req: Req) -> None:
        self.rows.remove(req)
        req.lease = None
        if self.partial is not None and self.partial[0] is req:
            self.partial = None

    def _finish(self, req: Req, kind: FinishKind) -> None:
        req.enter(ReqStatus.FINISHED, self.now_s)
        self.ended_s[req.rid] = self.now_s
        self.policy.finished(req, kind)


def _kv_len(req: Req) -> int:
    return req.prompt_len + req.max_new_tokens
