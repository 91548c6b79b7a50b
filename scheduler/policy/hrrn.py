"""`Hrrn`: highest response ratio next: between shortest prompt first and first come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...runtime.messages import FinishKind
from ..prefix_cache.base import PrefixMatch
from ..requests.req import Chunk, Req
from ..requests.requests import WaitingQueue
from .base import MAX_SORTED, PolicyParts, SchedulePolicy, overtaken_first


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
