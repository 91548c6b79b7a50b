"""`Requests`: every request that is not finished, in sets by status; one of them is the `WaitingQueue`."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final, Protocol

import numpy as np

from ...runtime.messages import Finish, FinishKind, GenerateRequest, TokenOutput
from ...runtime.transport.message_base import Logprobs
from ..arrays import EMPTY, BoolArray, IntArray
from ..prefix_cache.base import Session
from ..records.decision_log import Finished
from ..records.stats import DRAFT_METHODS
from .outputs import output_row
from .prompt_images import PromptImages
from .req import Req, ReqStatus


class QueueObserver(Protocol):
    """Notified of changes to the queue, and of ends. Policies implement it."""

    def enqueued(self, req: Req) -> None:
        """The request has joined the queue."""
        ...

    def dequeued(self, req: Req) -> None:
        """The request has left the queue."""
        ...

    def finished(self, req: Req, kind: FinishKind) -> None:
        """The request has ended."""
        ...


class WaitingQueue:
    """The requests without a row, in order of arrival.

    Arrivals and admissions are O(1) in the number of waiting requests, so ten thousand waiting requests do not slow
    down a step. A policy that needs another order makes it from the iteration.

    Attributes:
        num_tokens: of all of them, prompts and what retracted ones have generated.
    """

    def __init__(self, observer: QueueObserver, kv: RequestMemory) -> None:
        self.num_tokens = 0
        self._observer, self._kv = observer, kv
        # An OrderedDict instead of a dict: iterating a dict that has lost its first entries skips over the holes.
        self._reqs: OrderedDict[int, Req] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        """Iterate in order of arrival. Do not change the queue meanwhile."""
        return iter(self._reqs.values())

    def append(self, req: Req) -> None:
        """Add a request that arrived after all others."""
        self._reqs[req.seq] = req
        self.num_tokens += req.fill_len
        self._observer.enqueued(req)
        self._kv.enqueued(req)

    def requeue(self, req: Req) -> None:
        """Insert a retracted request at its position by arrival. The cost is the distance to the nearer end.

        SGLang appends a retracted request to the end of the queue. There it waits for all later arrivals, and longest
        when the load is highest. By arrival it is nearly always first: only requests that it overtook are before it.
        """
        seqs, seq = self._reqs, req.seq
        if not seqs or next(reversed(seqs)) < seq:
            seqs[seq] = req
        elif seq - next(iter(seqs)) < next(reversed(seqs)) - seq:  # nearer to the front
            before = list(takewhile(lambda other: other < seq, seqs))
            seqs[seq] = req
            for other in (seq, *reversed(before)):
                seqs.move_to_end(other, last=False)
        else:
            behind = list(takewhile(lambda other: other > seq, reversed(seqs)))
            seqs[seq] = req
            for other in reversed(behind):
                seqs.move_to_end(other)
        self.num_tokens += req.fill_len
        self._observer.enqueued(req)
        self._kv.enqueued(req)

    def remove(self, req: Req) -> None:
        """Remove a request from any position."""
        del self._reqs[req.seq]
        self.num_tokens -= req.fill_len
        self._observer.dequeued(req)
        self._kv.dequeued(req)


_BY_ARRIVAL: Final = operator.attrgetter("seq")


class RowObserver(Protocol):
    """Notified which requests have a row: adapter slots, parallel samples and speculation."""

    def started(self, req: Req) -> None:
        """The request got a row."""
        ...

    def stopped(self, req: Req) -> None:
        """The request lost its row: it has ended, or was retracted."""
        ...


class RequestMemory(Protocol):
    """The part of `KVMemory` that keeps the prefixes of waiting requests, and frees the memory of those that end."""

    def enqueued(self, req: Req) -> None:
        """A request joined the queue."""
        ...

    def dequeued(self, req: Req) -> None:
        """A request left the queue."""
        ...

    def release(self, req: Req, *, keep: bool) -> None:
        """Free the row and pages of a request. With `keep`, offer its computed pages to the prefix cache."""
        ...

    def keep_prompt(self, req: Req, now_s: float) -> None:
        """Keep the cached prompt of a request that has ended, if it asks for that."""
        ...

    def ended(self, req: Req) -> None:
        """A request has ended, with a row before or without one."""
        ...

    def drop_host_pages(self, req: Req) -> None:
        """Free the host pages of a swapped request."""
        ...


class RunningBatch:
    """An ordered set of requests with rows.

    Attributes:
        rows: [B] the pool rows of the requests.
        reqs: [B] the requests. Both are replaced, never modified, so that a batch in flight can keep them.
    """

    def __init__(self) -> None:
        self.rows: IntArray = EMPTY
        self.reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self.reqs)

    def add(self, reqs: list[Req]) -> None:
        """Append requests that begin to decode."""
        if reqs:
            self.rows = np.concatenate([self.rows, np.array([req.row for req in reqs], dtype=np.int32)])
            self.reqs = self.reqs + reqs

    def keep(self, mask: BoolArray) -> None:
        """Keep the requests with True in `mask` [B]; drop the others."""
        self.rows = self.rows[mask]
        self.reqs = list(itertools.compress(self.reqs, mask.tolist()))


class Requests:
    """The sets of requests. Each request is in `by_id` and in exactly one of the seven others.

    Attributes:
        by_id: all requests that are not finished.
        grammar: WAITING_GRAMMAR, by rid: their grammar is being compiled.
        receiving: RECEIVING, by rid: another engine computes their prompt, or a disk may have it.
        waiting: WAITING and RETRACTED: the queue. A retracted request must compute its tokens again.
        background: the same, of the class that runs on what the others leave; it has no request in `swapped`.
        swapped: SWAPPED, in order of arrival: requests with KV on the host.
        partial: PREFILL: requests with a row whose last prompt chunk is not planned yet.
        running: DECODE: requests with a row that decode.
        num_background: unfinished requests of that class, in whatever set.
    """

    def __init__(
        self, kv: RequestMemory, policy: QueueObserver, observers: Sequence[RowObserver] = ()
    ) -> None:
        self._kv = kv
        self._policy = policy
        self._observers = observers
        self._num_arrivals = 0
        self._finished: list[Finished] = []
        self.by_id: dict[str, Req] = {}
        self.grammar: dict[str, Req] = {}
        self.receiving: dict[str, Req] = {}
        self.waiting, self.background = WaitingQueue(policy, kv), WaitingQueue(policy, kv)
        self.num_background = 0
        self.swapped: list[Req] = []
        self.partial: list[Req] = []
        self.running = RunningBatch()

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, except those that wait for KV from elsewhere: no pass decides about them."""
        return len(self.waiting) + len(self.background) + len(self.swapped) + len(self.grammar)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting requests that must be computed, or found in the cache."""
        queued = self.waiting.num_tokens + self.background.num_tokens
        return queued + sum(req.fill_len for req in self.grammar.values())

    def queue_of(self, req: Req) -> WaitingQueue:
        """The queue in which a request of its class waits."""
        return self.background if req.background else self.waiting

    @property
    def has_interactive_decodes(self) -> bool:
        """Whether a request that is not of the background decodes."""
        if not self.num_background:
            return len(self.running) > 0
        return not all(req.background for req in self.running.reqs)

    @property
    def background_with_row(self) -> list[Req]:
        """The requests of the background class that have a row, also within a pass."""
        if not self.num_background:
            return []
        return [req for req in self.with_row if req.background and req.row >= 0]

    @property
    def with_row(self) -> list[Req]:
        """The requests that have a row and pages."""
        return self.running.reqs + self.partial

    @property
    def num_with_row(self) -> int:
        """Number of requests that have a row and pages."""
        return len(self.running) + len(self.partial)

    def receive(
        self,
        message: GenerateRequest,
        now_s: float,
        session: Session | None = None,
        images: PromptImages | None = None,
    ) -> Req:
        """Make the `Req` of a valid message, which is a turn of a session or of none, and queue it."""
        self._num_arrivals += 1
        req = self.by_id[message.rid] = Req(message, self._num_arrivals, now_s, session, images)
        self.num_background += req.background
        if req.status is ReqStatus.WAITING_GRAMMAR:
            self.grammar[req.rid] = req
        elif req.status is ReqStatus.RECEIVING:
            self.receiving[req.rid] = req
        else:
            self.queue_of(req).append(req)
        return req

    def grammar_ready(self, rid: str, now_s: float) -> None:
        """Queue a request after its grammar was compiled, at its position by arrival. Other rids are ignored."""
        req = self.grammar.pop(rid, None)
        if req is not None and req.receives_kv:
            req.enter(ReqStatus.RECEIVING, now_s)
            self.receiving[rid] = req
        elif req is not None:
            req.enter(ReqStatus.RETRACTED if req.num_delivered else ReqStatus.WAITING, now_s)
            self.queue_of(req).requeue(req)

    def await_kv(self, req: Req, now_s: float) -> None:
        """Take a request out of the queue until `kv_ready`: KV of its prompt may come from elsewhere."""
        self.queue_of(req).remove(req)
        req.enter(ReqStatus.RECEIVING, now_s)
        self.receiving[req.rid] = req

    def kv_ready(self, req: Req, now_s: float) -> None:
        """Queue a request after its prompt has come, or will not come, at its position by arrival."""
        del self.receiving[req.rid]
        ran = req.output_len or req.num_retractions
        req.enter(ReqStatus.RETRACTED if ran else ReqStatus.WAITING, now_s)
        self.queue_of(req).requeue(req)

    def start(self, req: Req, now_s: float) -> None:
        """Move a request that has just got a row from its queue to `partial`."""
        if req.status is ReqStatus.SWAPPED:
            self.swapped.remove(req)
        else:
            self.queue_of(req).remove(req)
        req.enter(ReqStatus.PREFILL, now_s)
        self.partial.append(req)
        for observer in self._observers:
            observer.started(req)

    def begin_decode(self, req: Req, now_s: float) -> None:
        """Move a request whose last prompt chunk is planned from `partial` to `running`."""
        self.partial.remove(req)
        req.enter(ReqStatus.DECODE, now_s)
        self.running.add([req])

    def requeue(self, req: Req, now_s: float) -> None:
        """Queue a retracted request; SWAPPED if its KV is on the host. Call `remove_stopped` afterwards."""
        for observer in self._observers:
            observer.stopped(req)
        req.num_retractions += 1
        req.prompt_logprobs = []  # if they were not sent yet, the prompt is computed again from its start
        if req.host_pages is None:
            req.enter(ReqStatus.RETRACTED, now_s)
            self.queue_of(req).requeue(req)
        else:
            req.enter(ReqStatus.SWAPPED, now_s)
            bisect.insort(self.swapped, req, key=_BY_ARRIVAL)

    def finish(
        self,
        req: Req,
        finish: Finish,
        now_s: float,
        token_ids: bytes = b"",
        logprobs: Logprobs | None = None,
        *,
        keep: bool = True,
        vector: bytes = b"",
    ) -> TokenOutput:
        """Finish a request in any status, free its row and memory, and return its last output row.

        The sampled token that ends a request has no KV and never gets any. Call `remove_stopped` afterwards.
        """
        match req.status:
            case ReqStatus.WAITING_GRAMMAR:
                del self.grammar[req.rid]
            case ReqStatus.RECEIVING:
                del self.receiving[req.rid]
            case ReqStatus.SWAPPED:
                self.swapped.remove(req)
                self._kv.drop_host_pages(req)
            case ReqStatus.WAITING | ReqStatus.RETRACTED:
                self.queue_of(req).remove(req)
            case _:
                self._kv.release(req, keep=keep)
                self._kv.keep_prompt(req, now_s)
                for observer in self._observers:
                    observer.stopped(req)
        req.enter(ReqStatus.FINISHED, now_s)
        del self.by_id[req.rid]
        self.num_background -= req.background
        self._kv.ended(req)
        self._policy.finished(req, finish.kind)
        drafts = req.num_drafts, req.num_accepted_drafts
        num_overruled = 0 if req.grammar_figures is None else req.grammar_figures.num_overruled
        self._finished.append(
            Finished(
                req.rid,
                finish.kind,
                req.output_len,
                finish.message,
                *drafts,
                num_overruled,
                tuple(DRAFT_METHODS[method] for method in sorted(req.draft_methods)),
            )
        )
        return output_row(req, token_ids, finish, logprobs, vector)

    def remove_stopped(self) -> None:
        """Remove requests that finished or were retracted from `partial` and `running`, all in one call."""
        decode = ReqStatus.DECODE  # one attribute look-up instead of one per request
        still_decode = [req.status is decode for req in self.running.reqs]
        if not all(still_decode):
            self.running.keep(np.array(still_decode))
        self.partial = [req for req in self.partial if req.status is ReqStatus.PREFILL]

    def take_finished(self) -> list[Finished]:
        """The requests that have ended since the last call; for the decision log."""
        finished, self._finished = self._finished, []
        return finished
