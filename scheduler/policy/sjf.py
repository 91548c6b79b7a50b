"""`Sjf`: shortest job first, so that many short requests do not wait for a long one."""

from __future__ import annotations

from ...runtime.messages import FinishKind
from ..requests.req import Req
from .length_estimate import LengthEstimate
from .static_order import StaticOrder


class Sjf(StaticOrder):
    """By the length of prompt and expected output, less `ageing` tokens for each second of waiting.

    Lowest mean completion time of all orders that let requests run to their end, where the estimates are right. With
    ageing 0 a long request starves while short ones keep coming; else see `StaticOrder`.
    """

    name = "sjf"

    def __init__(self, estimate: LengthEstimate, ageing: float) -> None:
        super().__init__()
        self._estimate = estimate
        self._ageing = ageing

    def length(self, req: Req) -> int:
        """Tokens that decide."""
        return req.prompt_len + self._estimate.output_len(req)

    def key(self, req: Req) -> float:
        return self.length(req) + self._ageing * req.arrival_s

    def finished(self, req: Req, kind: FinishKind) -> None:
        self._estimate.finished(req, kind)
