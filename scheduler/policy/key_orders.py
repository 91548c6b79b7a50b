"""Policies that sort the waiting queue by one key: `fcfs`, `lpm`, `priority`, `sjf`, `srtf`, `lof`, `random`.

All but `Fcfs` and `Lpm` derive from `KeyOrder`: the key of a request does not change while it waits, so an index keeps
the order and a pass sorts nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from ...runtime.messages import FinishKind
from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .ageing import overtaken_first
from .base import MAX_SORTED, PolicyParts, SchedulePolicy
from .length_estimate import LengthEstimate
from .ordered_index import OrderedIndex


class Fcfs(SchedulePolicy):
    """`fcfs`, the default: first come, first served. Costs nothing per waiting request, and no request starves."""

    name = "fcfs"

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return waiting


class Lpm(SchedulePolicy):
    """`lpm`: longest prefix match first, so that a cached prefix is used before it is evicted.

    Most cached pages first, equals by arrival. A request that was overtaken in `MAX_OVERTAKEN` passes comes before all
    others. SGLang's policy of the same name has no ageing: there a request without a cached prefix waits for as long
    as requests with one keep coming. Above `MAX_SORTED` waiting requests the order is `fcfs`.
    """

    name = "lpm"

    def __init__(self, parts: PolicyParts) -> None:
        self._matches = parts.matches

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        if len(waiting) > MAX_SORTED:
            return waiting
        reqs = list(waiting)
        num_pages = {req.seq: match.num_pages for req, match in zip(reqs, self._matches(reqs), strict=True)}
        reqs.sort(key=lambda req: (-num_pages[req.seq], req.seq))
        return overtaken_first(waiting, reqs)


class KeyOrder(SchedulePolicy):
    """Orders by ascending `key`, equals by arrival.

    Linear ageing keeps the key constant, too: if each second of waiting lowers the key by `a`, all keys sink together,
    and `key - a * waited` compares as `key + a * arrival` does. So nothing is sorted again over time. No request
    starves: one that arrives later than `key / a` seconds after another can never overtake it.
    """

    def __init__(self) -> None:
        self._index = OrderedIndex()

    def key(self, req: Req) -> float:
        """Smaller comes earlier. Computed once, when the request joins the queue."""
        raise NotImplementedError

    def enqueued(self, req: Req) -> None:
        self._index.add(req, self.key(req))

    def dequeued(self, req: Req) -> None:
        self._index.remove(req)

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return self._index


class Priority(KeyOrder):
    """`priority`: larger `Req.priority` first, equals by arrival; `ageing_s` seconds of waiting count as one level.

    A request of priority p is overtaken by requests of priority q that arrive within `(q - p) * ageing_s` seconds after
    it, and by no later ones. With `ageing_s` 0 priorities are strict and low ones may starve. A waiting request
    preempts only running requests that come after it in this order. Otherwise a request that has waited its time would
    be started and preempted again and again.
    """

    name = "priority"
    by_priority = True

    def __init__(self, ageing_s: float, *, preempts: bool) -> None:
        super().__init__()
        self._ageing_s = ageing_s
        self.preempts = preempts

    def key(self, req: Req) -> float:
        if not self._ageing_s:
            return -req.priority
        return req.arrival_s / self._ageing_s - req.priority

    def may_displace(self, req: Req, victim: Req) -> bool:
        return self.preempts and self.key(req) < self.key(victim)


class Sjf(KeyOrder):
    """`sjf`, shortest job first: by prompt and expected output length, less `ageing` tokens per second of waiting.

    Lowest mean completion time of all orders without preemption, where the estimates are right. With `ageing` 0 a long
    request starves while short ones keep coming.
    """

    name = "sjf"

    def __init__(self, estimate: LengthEstimate, ageing: float) -> None:
        super().__init__()
        self._estimate = estimate
        self._ageing = ageing

    def length(self, req: Req) -> int:
        """Tokens that the order counts."""
        return req.prompt_len + self._estimate.output_len(req)

    def key(self, req: Req) -> float:
        return self.length(req) + self._ageing * req.arrival_s

    def finished(self, req: Req, kind: FinishKind) -> None:
        self._estimate.finished(req, kind)


class Srtf(Sjf):
    """`srtf`, shortest remaining time first: as `Sjf`, by the tokens that are still to come.

    For a request without output these are its prompt and its expected output, as for `Sjf`. For a retracted request
    they are the rest of its output. Recomputing its KV is not counted: much of it is usually still cached, and
    thousands of such tokens share a step, while each output token takes a step. So a request that is nearly done is
    resumed first and frees its memory soonest. Running requests are not preempted for shorter ones: their KV would be
    computed twice.
    """

    name = "srtf"

    def length(self, req: Req) -> int:
        to_generate = self._estimate.output_len(req) - req.output_len
        return to_generate if req.output_len else req.prompt_len + to_generate


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
