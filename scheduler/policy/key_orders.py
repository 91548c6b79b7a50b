"""Policies that sort the waiting queue by one key: `fcfs`, `lpm`, `priority`, `sjf`, `srtf`.

All but `Fcfs` and `Lpm` derive from `KeyOrder`: the key of a request does not change while it waits, so an index keeps
the order and a pass sorts nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from ...runtime.config.engine_config import LengthEstimate as LengthEstimateName
from ...runtime.messages import FinishKind
from ..requests.req import Req
from ..requests.requests import WaitingQueue
from .base import MAX_SORTED, OrderedIndex, PolicyParts, SchedulePolicy, overtaken_first

_COMPLETE: Final = frozenset({FinishKind.STOP, FinishKind.LENGTH})

WEIGHT_OF_LATEST: Final = 0.1
"""Weight of the latest answer in its tenant's average; about the last ten answers count."""

MAX_TENANTS: Final = 4096
"""Tenants with an average; the tenant with the oldest last answer is forgotten first."""


class LengthEstimate:
    """Estimates the length of outputs. This base takes `max_new_tokens`, exact for clients that set what they need."""

    def output_len(self, req: Req) -> int:
        """Expected tokens of the whole output; more than it has, and at most `max_new_tokens`."""
        return req.max_new_tokens

    def finished(self, req: Req, kind: FinishKind) -> None:
        """An output has ended; the estimate may learn from it."""


class TenantAverage(LengthEstimate):
    """The moving average of the tenant's last answers, for clients that always allow 4,096 tokens and get 80.

    Without an average, and for an output that is longer than the average, it is `max_new_tokens`: once the average is
    exceeded, it does not predict the rest.
    """

    def __init__(self) -> None:
        self._averages: OrderedDict[str, float] = OrderedDict()  # in the order of their last change

    def output_len(self, req: Req) -> int:
        average = self._averages.get(req.tenant, math.inf)
        if average <= req.output_len or average >= req.max_new_tokens:
            return req.max_new_tokens
        return math.ceil(average)

    def finished(self, req: Req, kind: FinishKind) -> None:
        if kind not in _COMPLETE or not req.output_len:
            return  # the length of an aborted answer does not predict the next one
        average = self._averages.setdefault(req.tenant, float(req.output_len))
        self._averages[req.tenant] = average + WEIGHT_OF_LATEST * (req.output_len - average)
        self._averages.move_to_end(req.tenant)
        if len(self._averages) > MAX_TENANTS:
            self._averages.popitem(last=False)


def make_length_estimate(name: LengthEstimateName) -> LengthEstimate:
    """The estimate that the configuration names."""
    return TenantAverage() if name == "tenant-average" else LengthEstimate()


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
