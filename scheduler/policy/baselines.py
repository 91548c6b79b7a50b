"""Baselines of text books to compare with: `fifo-serial`, `static`, `lof`, `random` and `hrrn`."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Sequence

from ...runtime.messages import FinishKind
from ..prefix_cache.base import PrefixMatch
from ..records.verdict import Reason
from ..requests.req import Chunk, Req
from ..requests.requests import WaitingQueue
from .base import MAX_SORTED, OrderedIndex, PolicyParts, SchedulePolicy, overtaken_first
from .key_orders import KeyOrder


class FifoSerial(SchedulePolicy):
    """`fifo-serial`: by arrival, one request at a time."""

    name = "fifo-serial"
    full_reason = Reason.ONE_AT_A_TIME

    def __init__(self, parts: PolicyParts) -> None:
        self._load = parts.load

    def hold(self, waiting: WaitingQueue, now_s: float) -> Reason | None:
        return Reason.ONE_AT_A_TIME if self._load().num_running else None

    def max_offers(self, waiting: WaitingQueue) -> int | None:
        return 1

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return waiting


class StaticBatch(SchedulePolicy):
    """`static`: waits for `batch_size` requests, or `max_wait_s` for fewer; admits no others until all have finished.

    A request of the batch that does not fit in the first pass, because the step's budget or the memory is spent, or
    that was retracted, stays in the batch and is admitted when it fits. The padding of the textbook concerns the cost
    of a step, not the members of the batch.
    """

    name = "static"
    full_reason = Reason.BATCH_RUNNING

    def __init__(self, parts: PolicyParts, batch_size: int, max_wait_s: float) -> None:
        self._load = parts.load
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._batch: set[int] = set()  # members that have not finished
        self._waiting = OrderedIndex()  # by arrival

    def enqueued(self, req: Req) -> None:
        self._waiting.add(req, req.seq)

    def dequeued(self, req: Req) -> None:
        if req.lease is not None and not self._batch:  # the first admission closes the batch
            self._batch = {member.seq for member in self._waiting_members()}
        self._waiting.remove(req)

    def finished(self, req: Req, kind: FinishKind) -> None:
        self._batch.discard(req.seq)

    def hold(self, waiting: WaitingQueue, now_s: float) -> Reason | None:
        if self._batch:
            # Members without a row that do not wait are swapped out and must be admitted again.
            return None if self._num_without_row() else Reason.BATCH_RUNNING
        wake_s = self.wake_s(waiting)
        if wake_s is None or (len(waiting) < self._batch_size and now_s < wake_s):
            return Reason.BATCH_FORMING
        return None

    def wake_s(self, waiting: WaitingQueue) -> float | None:
        if self._batch or not waiting:
            return None
        oldest = next(iter(waiting))
        assert oldest.queued_s is not None, "it is in the queue"
        return oldest.queued_s + self._max_wait_s

    def max_offers(self, waiting: WaitingQueue) -> int | None:
        """Members come first in the order, and no request after them is offered."""
        return self._num_without_row() if self._batch else self._batch_size

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        members = self._waiting_members()
        seqs = {req.seq for req in members}
        return itertools.chain(members, (req for req in waiting if req.seq not in seqs))

    def _waiting_members(self) -> list[Req]:
        """Waiting members by arrival; before there is a batch, the requests that will form it."""
        if self._batch:
            return [req for req in self._waiting if req.seq in self._batch]
        return list(itertools.islice(self._waiting, self._batch_size))

    def _num_without_row(self) -> int:
        return max(0, len(self._batch) - self._load().num_running)


class Lof(KeyOrder):
    """`lof`, longest output first: largest `max_new_tokens` first, equals by arrival.

    For batches of jobs: the whole finishes earlier when the longest ones start first. Bad for latency. A request that
    was overtaken in `MAX_OVERTAKEN` passes comes before all others; SGLang's policy of this name has no ageing.
    """

    name = "lof"

    def key(self, req: Req) -> float:
        return -req.max_new_tokens

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return overtaken_first(waiting, self._index)


class RandomOrder(KeyOrder):
    """`random`: by a hash of the seed and the arrival number. A baseline, and a test of what depends on the order.

    A request keeps its position while it waits, across retractions as well: the order is drawn once per request and not
    once per pass. So equal runs decide equally, and a pass does not shuffle ten thousand requests.
    """

    name = "random"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = str(seed).encode()

    def key(self, req: Req) -> float:
        digest = hashlib.blake2b(struct.pack("<q", req.seq), digest_size=6, key=self._seed[:64]).digest()
        return int.from_bytes(digest, "little")

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return overtaken_first(waiting, self._index)


class Hrrn(SchedulePolicy):
    """Largest `tokens that the engine computed since the arrival / prompt tokens to compute` first.

    Short prompts, and those with a cached prefix, come first. A long prompt gains with every token of other requests,
    so it does not starve. Time is counted in tokens, so the ratio does not depend on the hardware. A request that was
    overtaken in `MAX_OVERTAKEN` passes comes before all others. Above `MAX_SORTED` waiting requests the order is
    `fcfs`.

    Source: SGLang's policy of the same name. There a request with nothing to compute comes first; here at least the
    last token of a prompt is always computed.
    """

    name = "hrrn"

    def __init__(self, parts: PolicyParts) -> None:
        self._matches = parts.matches
        self._page_size = parts.page_size
        self._clock_tokens = 0
        self._arrivals: dict[
            int, int
        ] = {}  # seq -> the clock at arrival; of all requests that have not ended

    def enqueued(self, req: Req) -> None:
        self._arrivals.setdefault(req.seq, self._clock_tokens)

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req]) -> None:
        self._clock_tokens += sum(chunk.length for chunk in chunks) + len(decodes)

    def gained(self, req: Req, num_tokens: int) -> None:
        self._clock_tokens += num_tokens

    def finished(self, req: Req, kind: FinishKind) -> None:
        self._arrivals.pop(req.seq, None)

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        if len(waiting) > MAX_SORTED:
            return waiting
        reqs = list(waiting)
        ratios = {
            req.seq: self._ratio(req, match) for req, match in zip(reqs, self._matches(reqs), strict=True)
        }
        reqs.sort(key=lambda req: (-ratios[req.seq], req.seq))
        return overtaken_first(waiting, reqs)

    def _ratio(self, req: Req, match: PrefixMatch) -> float:
        waited_tokens = self._clock_tokens - self._arrivals[req.seq]
        return waited_tokens / (req.fill_len - match.num_pages * self._page_size)
