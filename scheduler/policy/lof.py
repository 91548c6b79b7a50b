"""`Lof`: longest output first, so that no long answer is left over when the rest is done."""

from __future__ import annotations

from collections.abc import Iterable

from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .ageing import overtaken_first
from .static_order import StaticOrder


class Lof(StaticOrder):
    """Largest `max_new_tokens` first, equals by arrival; who was overtaken too often before everybody.

    For batches of jobs: the whole is done earlier when the longest ones start first. Bad for latency. As SGLang's
    policy of this name, which has no ageing.
    """

    name = "lof"

    def key(self, req: Req) -> float:
        return -req.max_new_tokens

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return overtaken_first(waiting, self._index)
