"""`LengthEstimate`: how long an answer will be that nobody knows yet."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, Protocol

from ...runtime.config.engine_config import LengthEstimate as LengthEstimateName
from ...runtime.messages import FinishKind
from ..requests.req import Req

_COMPLETE: Final = frozenset({FinishKind.STOP, FinishKind.LENGTH})

WEIGHT_OF_LATEST: Final = 0.1
"""What the answer that has just ended adds to its tenant's average: about the last ten answers count."""

MAX_TENANTS: Final = 4096
"""Tenants whose average is remembered; the one whose last answer ended longest ago is forgotten first."""


class LengthEstimate(Protocol):
    """Estimates the length of outputs."""

    def output_len(self, req: Req) -> int:
        """Tokens the whole output will have, probably; more than it has, and at most `max_new_tokens`."""
        ...

    def finished(self, req: Req, kind: FinishKind) -> None:
        """An output has ended: a chance to learn."""
        ...


class MaxTokens:
    """What the client allows. Exact for clients that know what they ask for."""

    def output_len(self, req: Req) -> int:
        return req.max_new_tokens

    def finished(self, req: Req, kind: FinishKind) -> None:
        pass


class TenantAverage:
    """The moving average of the tenant's last answers: clients allow 4,096 tokens and get 80, again and again.

    While nothing is known, and for an output that has grown beyond the average, it is `max_new_tokens`: an estimate
    that was wrong once says nothing about the rest.
    """

    def __init__(self) -> None:
        self._averages: OrderedDict[str, float] = OrderedDict()  # in the order of their last change

    def output_len(self, req: Req) -> int:
        average = self._averages.get(req.tenant, math.inf)
        if average <= req.output_len or average >= req.max_new_tokens:
            return req.max_new_tokens
        return math.ceil(average)

    def finished(self, req: Req, kind: FinishKind) -> None:
        if (
            kind not in _COMPLETE or not req.output_len
        ):  # where a client left says nothing about the next answer
            return
        average = self._averages.setdefault(req.tenant, float(req.output_len))
        self._averages[req.tenant] = average + WEIGHT_OF_LATEST * (req.output_len - average)
        self._averages.move_to_end(req.tenant)
        if len(self._averages) > MAX_TENANTS:
            self._averages.popitem(last=False)


def make_length_estimate(name: LengthEstimateName) -> LengthEstimate:
    """The estimate that the configuration names."""
    return TenantAverage() if name == "tenant-average" else MaxTokens()
