"""`LengthEstimate`: the expected length of an answer."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, Protocol

from ...runtime.config.engine_config import LengthEstimate as LengthEstimateName
from ...runtime.messages import FinishKind
from ..requests.req import Req

_COMPLETE: Final = frozenset({FinishKind.STOP, FinishKind.LENGTH})

WEIGHT_OF_LATEST: Final = 0.1
"""Weight of the latest answer in its tenant's average; about the last ten answers count."""

MAX_TENANTS: Final = 4096
"""Tenants with an average; the tenant with the oldest last answer is forgotten first."""


class LengthEstimate(Protocol):
    """Estimates the length of outputs."""

    def output_len(self, req: Req) -> int:
        """Expected tokens of the whole output; more than it has, and at most `max_new_tokens`."""
        ...

    def finished(self, req: Req, kind: FinishKind) -> None:
        """An output has ended; the estimate may learn from it."""
        ...


class MaxTokens:
    """`max_new_tokens`. Exact for clients that set it to the length they need."""

    def output_len(self, req: Req) -> int:
        return req.max_new_tokens

    def finished(self, req: Req, kind: FinishKind) -> None:
        pass


class TenantAverage:
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
        if (
            kind not in _COMPLETE or not req.output_len
        ):  # the length of an aborted answer does not predict the next one
            return
        average = self._averages.setdefault(req.tenant, float(req.output_len))
        self._averages[req.tenant] = average + WEIGHT_OF_LATEST * (req.output_len - average)
        self._averages.move_to_end(req.tenant)
        if len(self._averages) > MAX_TENANTS:
            self._averages.popitem(last=False)


def make_length_estimate(name: LengthEstimateName) -> LengthEstimate:
    """The estimate that the configuration names."""
    return TenantAverage() if name == "tenant-average" else MaxTokens()
