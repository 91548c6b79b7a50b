"""`Requests`: every request that is not finished, by where it is."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from ...runtime.messages import Finish, FinishKind, GenerateRequest, Logprobs, TokenOutput
from ..arrays import EMPTY, BoolArray, IntArray
from ..records.decision_log import Finished
from .outputs import output_row
from .req import Req, ReqStatus
from .waiting_queue import QueueObserver, WaitingQueue

_BY_ARRIVAL: Final = operator.attrgetter("seq")


class RowObserver(Protocol):
    """Who wants to know which requests hold a row: constraints, siblings."""

    def started(self, req: Req) -> None:
        """It was given a row."""
        ...

    def stopped(self, req: Req) -> None:
        """It lost its row: it has ended, or was retracted."""
        ...


class RequestMemory(Protocol):
    """The KV memory, where it concerns a request that ends."""

    def release(self, req: Req, *, keep: bool) -> None:
        """Free the row and pages of a request; with `keep`, offer computed pages to the prefix cache."""
        ...

    def drop_host_pages(self, req: Req) -> None:
        """Free the host pages of a swapped request."""
        ...


class PolicyHooks(QueueObserver, Protocol):
    """The policy, where it concerns the sets of requests."""

    def finished(self, req: Req, kind: FinishKind) -> None:
        """A request has ended."""
        ...


class RunningBatch:
    """An ordered set of requests with rows.

    Attributes:
        rows: [B] their pool rows.
        reqs: the same requests. Both are replaced, never changed, so that a batch in flight can keep them.
    """

    __slots__ = ("reqs", "rows")

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
        """Drop all requests with a False."""
        self.rows = self.rows[mask]
        self.reqs = list(itertools.compress(self.reqs, mask.tolist()))


class Requests:
    """The sets of requests; each is in exactly one of the five.

    Attributes:
        by_id: all of them.
        grammar: aside until their grammar is there, by id.
        waiting: in the queue, with nothing or with tokens that must be computed again.
        swapped: their KV is on the host; in order of arrival.
        partial: with a row, their prompts in the middle of their chunks.
        running: with a row, decoding.
    """

    __slots__ = (
        "_finished",
        "_kv",
        "_num_arrivals",
        "_observers",
        "_policy",
        "by_id",
        "grammar",
        "partial",
        "running",
        "swapped",
        "waiting",
    )

    def __init__(self, kv: RequestMemory, policy: PolicyHooks, observers: Sequence[RowObserver] = ()) -> None:
        self._kv = kv
        self._policy = policy
        self._observers = observers
        self._num_arrivals = 0
        self._finished: list[Finished] = []
        self.by_id: dict[str, Req] = {}
        self.grammar: dict[str, Req] = {}
        self.waiting = WaitingQueue(policy)
        self.swapped: list[Req] = []
        self.partial: list[Req] = []
        self.running = RunningBatch()

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.waiting) + len(self.swapped) + len(self.grammar)

    @property
    def with_row(self) -> list[Req]:
        """Those that hold memory."""
        return self.running.reqs + self.partial

    @property
    def num_with_row(self) -> int:
        """How many hold memory."""
        return len(self.running) + len(self.partial)

    def receive(self, message: GenerateRequest, now_s: float) -> Req:
        """Queue a request that was found to be sound."""
        self._num_arrivals += 1
        req = self.by_id[message.rid] = Req(message, self._num_arrivals, now_s)
        if req.status is ReqStatus.WAITING_GRAMMAR:
            self.grammar[req.rid] = req
        else:
            self.waiting.append(req)
        return req

    def grammar_ready(self, rid: str, now_s: float) -> None:
        """Queue a request whose grammar is there, at its place by arrival; other ids are ignored."""
        req = self.grammar.pop(rid, None)
        if req is not None:
            req.enter(ReqStatus.WAITING, now_s)
            self.waiting.requeue(req)

    def start(self, req: Req, now_s: float) -> None:
        """Take a request that has just got a row out of its queue."""
        if req.status is ReqStatus.SWAPPED:
            self.swapped.remove(req)
        else:
            self.waiting.remove(req)
        req.enter(ReqStatus.PREFILL, now_s)
        self.partial.append(req)
        for observer in self._observers:
            observer.started(req)

    def begin_decode(self, req: Req, now_s: float) -> None:
        """The last chunk of a prompt is planned."""
        self.partial.remove(req)
        req.enter(ReqStatus.DECODE, now_s)
        self.running.add([req])

    def requeue(self, req: Req, now_s: float) -> None:
        """Queue a request whose row was taken; SWAPPED if its KV is on the host. Call `remove_stopped` afterwards."""
        for observer in self._observers:
            observer.stopped(req)
        req.num_retractions += 1
        req.prompt_logprobs = []  # if they are still to be sent, they will come again from the start
        if req.host_pages is None:
            req.enter(ReqStatus.RETRACTED, now_s)
            self.waiting.requeue(req)
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
    ) -> TokenOutput:
        """Finish a request wherever it is, free all it has, and make its last row.

        The sampled token that ends it has no KV and never gets any. Call `remove_stopped` afterwards.
        """
        match req.status:
            case ReqStatus.WAITING_GRAMMAR:
                del self.grammar[req.rid]
            case ReqStatus.SWAPPED:
                self.swapped.remove(req)
                self._kv.drop_host_pages(req)
            case ReqStatus.WAITING | ReqStatus.RETRACTED:
                self.waiting.remove(req)
            case _:
                self._kv.release(req, keep=keep)
                for observer in self._observers:
                    observer.stopped(req)
        req.enter(ReqStatus.FINISHED, now_s)
        del self.by_id[req.rid]
        self._policy.finished(req, finish.kind)
        drafts = req.num_drafts, req.num_accepted_drafts
        self._finished.append(Finished(req.rid, finish.kind, req.output_len, finish.message, *drafts))
        return output_row(req, token_ids, finish, logprobs)

    def remove_stopped(self) -> None:
        """Take requests that finished or were retracted out of `partial` and `running`; once for many of them."""
        decode = ReqStatus.DECODE  # looked up once, not for each of a thousand
        still_decode = [req.status is decode for req in self.running.reqs]
        if not all(still_decode):
            self.running.keep(np.array(still_decode))
        self.partial = [req for req in self.partial if req.status is ReqStatus.PREFILL]

    def take_finished(self) -> list[Finished]:
        """Who has ended since the last call; for the decision log."""
        finished, self._finished = self._finished, []
        return finished
