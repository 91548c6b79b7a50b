"""`RunnerDrafts`: how many of the drafts that the runner's drafter makes are right, and what they cost.

The drafter is a second model (a draft model, an EAGLE-3 head, layers that predict further tokens). The plan says only
how many drafts a request gets, because the drafter needs states that only the runner has. So the scheduler has rates
of them: the share of right ones at each position after right ones, of the request and of all requests, and the
seconds per draft that results report. Rates are learned when drafts are tried. While there are none they return slowly
to the first guess, so that a drafter that failed on one part of a text is tried on another one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...runtime.step_plan import RUNNER_DRAFT
from ..arrays import IntArray
from ..batch import ScheduleBatch
from ..requests.req import Req

Float64s = npt.NDArray[np.float64]

_FIRST_RATE: Final = 0.6
_OWN_WEIGHT: Final = 1 / 12
_SHARED_WEIGHT: Final = 1 / 128
_RETURN_WEIGHT: Final = 1 / 512
"""Weight of the first guess in a step without drafts: half the way back takes some 350 steps."""
_COST_WEIGHT: Final = 0.25


class RunnerDrafts:
    """See the module.

    Attributes:
        method: index into `DRAFT_METHODS`.
        draft_s: seconds per draft; 0 until some are measured, so that they are tried.
    """

    def __init__(self, method: int, max_drafts: int) -> None:
        """`max_drafts`: of one request in a step."""
        self.method = method
        self.draft_s = 0.0
        self._shared: Float64s = np.full(max_drafts, _FIRST_RATE)
        self._own: dict[Req, Float64s] = {}

    def chances(self, req: Req, count: int) -> list[float]:
        """For each of `count` drafts of a request, the probability that it and all before it are right."""
        rates = self._own.get(req)
        if rates is None:
            rates = self._own[req] = self._shared.copy()
        chances: list[float] = np.cumprod(rates[: max(0, count)]).tolist()
        return chances

    def not_tried(self, req: Req) -> None:
        """The request, which `chances` knows, has no drafts of the runner in this step."""
        rates = self._own[req]
        rates += _RETURN_WEIGHT * (_FIRST_RATE - rates)
        self._shared += _RETURN_WEIGHT / 4 * (_FIRST_RATE - self._shared)

    def checked(self, batch: ScheduleBatch, num_accepted: IntArray) -> None:
        """Learn from a step with drafts: [B] numbers of accepted ones."""
        num_drafts = np.frombuffer(batch.plan.num_drafts, dtype=np.int32)
        firsts = np.cumsum(num_drafts) - num_drafts
        draft_ids = np.frombuffer(batch.plan.draft_ids, dtype=np.int32)
        for idx in np.flatnonzero(num_drafts).tolist():
            if draft_ids[firsts[idx]] == RUNNER_DRAFT:
                self._learn(batch.reqs[idx], int(num_drafts[idx]), int(num_accepted[idx]))

    def _learn(self, req: Req, num_drafts: int, num_accepted: int) -> None:
        tried = min(num_drafts, num_accepted + 1)  # the first wrong one is the last that says something
        hits = (np.arange(tried) < num_accepted).astype(np.float64)
        self._shared[:tried] += _SHARED_WEIGHT * (hits - self._shared[:tried])
        own = self._own.get(req)
        if own is not None:
            own[:tried] += _OWN_WEIGHT * (hits - own[:tried])

    def measured(self, batch: ScheduleBatch, seconds: float) -> None:
        """Making the drafts of a step took `seconds`."""
        count = int((np.frombuffer(batch.plan.draft_ids, dtype=np.int32) == RUNNER_DRAFT).sum())
        if count:
            each = seconds / count
            self.draft_s += (_COST_WEIGHT if self.draft_s else 1.0) * (each - self.draft_s)

    def stopped(self, req: Req) -> None:
        """Forget a request that lost its row."""
        self._own.pop(req, None)
