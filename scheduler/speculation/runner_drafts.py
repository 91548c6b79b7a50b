"""`RunnerDrafts`: how many of the drafts that the runner's drafter makes are right, and what they may cost.

The drafter is a second model (a draft model, an EAGLE-3 head, layers that predict further tokens). The plan says only
how many drafts a request gets, because the drafter needs states that only the runner has. Unlike copies of a text, its
drafts show whether they are right only if they are made, which costs time. Two things decide about them:

- Rates (`DraftRates`): the share of right drafts at each position after right ones, of all requests and of each. Drafts
  that gain by these rates are planned.
- Credit: seconds that drafts may still lose. A step with drafts adds what it saved or subtracts what it lost; time adds
  `_SHARE` of itself; it never exceeds `_MOST_STEPS` plain steps. A plan that would lose more if all its drafts were
  wrong is not made. While drafts gain nothing, the credit pays for trials: one draft of one request in a step, and a
  plain step after it.

So with any drafter decodes take at most `_SHARE` longer than without, once `_MOST_STEPS` steps, and the drafts of one
step: of two drafts in a row the faster one counts, and the first one as a plain step at most. The first ones are
recorded, and a pause of the machine may slow any. A drafter that is never right is tried in one of some 20 to 70 steps,
by what a draft costs; once it becomes right, its first trial earns the credit for more.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ...runtime.step_plan import RUNNER_DRAFT
from ..arrays import IntArray
from ..batch import ScheduleBatch
from ..requests.req import Req
from .step_costs import Float64s, StepCosts

_FIRST_RATE: Final = 0.6
_GUESS_WEIGHT: Final = 4.0
"""Weight of the guess beside the counts, in tries."""
_OWN_TRIES: Final = 16
_SHARED_TRIES: Final = 64
_FADING: Final = 255 / 256
"""Weight that counts keep in a step that tells nothing about them: half of it takes 180 steps."""
_SHARE: Final = 0.005
_MOST_STEPS: Final = 4
_COST_WEIGHT: Final = 0.5


class DraftRates:
    """Shares of right drafts by position, as counts of tries that fade.

    The rate of a position is its counts and, with the weight of a few tries, a guess. So a position that was never
    tried has the rate of the one before it.
    """

    def __init__(self, max_drafts: int, most_tries: int) -> None:
        """`most_tries`: older ones fade, so that about as many count."""
        self._tries = [0.0] * max_drafts
        self._right = [0.0] * max_drafts
        self._keeping = 1 - 1 / most_tries

    def rate(self, idx: int, guess: float) -> float:
        """The rate of a position."""
        return (self._right[idx] + _GUESS_WEIGHT * guess) / (self._tries[idx] + _GUESS_WEIGHT)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """A step checked drafts. The first wrong one is the last that tells something."""
        tried = min(num_drafts, num_accepted + 1)
        for idx in range(tried):
            self._tries[idx] = self._tries[idx] * self._keeping + 1.0
            self._right[idx] = self._right[idx] * self._keeping + (idx < num_accepted)
        self.fade(tried)

    def fade(self, first: int = 0) -> None:
        """A step told nothing about the positions from `first` on."""
        for idx in range(first, len(self._tries)):
            self._tries[idx] *= _FADING
            self._right[idx] *= _FADING


class RunnerDrafts:
    """See the module.

    Attributes:
        method: index into `DRAFT_METHODS`.
        draft_s: seconds to make one draft of each of a step's requests, which are made together; 0 until some are
            measured, so that they are tried.
        credit_s: seconds that drafts may lose; infinite until a plain step is measured.
        by_runner: the requests whose drafts in the step that is planned are the runner's, if they get any.
    """

    def __init__(self, method: int, max_drafts: int) -> None:
        """`max_drafts`: of one request in a step."""
        self.method = method
        self.draft_s = 0.0
        self.credit_s = self._most_s = self._last_draft_s = math.inf
        self._max_drafts = max_drafts
        self._shared = DraftRates(max_drafts, _SHARED_TRIES)
        self._own: dict[Req, DraftRates] = {}
        self.by_runner: set[Req] = set()
        self._first_chances: dict[Req, float] = {}  # of the requests that may have drafts in the step
        self._was_trial = False

    def begin_step(self) -> None:
        """A step is planned: `chances` of requests, `by_runner`, then `limit`."""
        self.by_runner.clear()
        self._first_chances.clear()

    def chances(self, req: Req, count: int) -> list[float]:
        """For each of `count` drafts of a request, the probability that it and all before it are right."""
        own = self._own.get(req)
        if own is None:
            own = self._own[req] = DraftRates(self._max_drafts, _OWN_TRIES)
        chances: list[float] = []
        chance, rate, shared_before = 1.0, _FIRST_RATE, _FIRST_RATE
        for idx in range(count):
            shared = self._shared.rate(idx, shared_before)
            # The guess for a request: its rate changes from position to position like that of all requests.
            rate = own.rate(idx, min(1.0, max(0.0, rate + shared - shared_before)))
            chance *= rate
            chances.append(chance)
            shared_before = shared
        if chances:
            self._first_chances[req] = chances[0]
        return chances

    def limit(self, reqs: list[Req], counts: list[int], intervals: Float64s) -> list[int]:
        """The numbers of drafts without those of the runner that may lose too much, or with one that is a trial.

        Args:
            reqs: the step's B requests.
            counts: drafts of each of them; empty if there are none.
            intervals: seconds of a step with 0, 1, ... drafts.
        """
        counts = counts or [0] * len(reqs)
        theirs = [count for req, count in zip(reqs, counts, strict=True) if req in self.by_runner]
        made, num_drafts = sum(theirs), sum(counts)
        if made:
            verifying_s = (intervals[num_drafts] - intervals[0]) * made / num_drafts
            if verifying_s + max(theirs) * self.draft_s > self.credit_s:
                num_drafts, made = num_drafts - made, 0
                counts = [
                    0 if req in self.by_runner else count for req, count in zip(reqs, counts, strict=True)
                ]
        idle = [idx for idx, req in enumerate(reqs) if not counts[idx] and req in self._first_chances]
        may_try = idle and not made and not self._was_trial and num_drafts + 1 < len(intervals)
        self._was_trial = False
        if may_try:
            trial_s = intervals[num_drafts + 1] - intervals[num_drafts] + self.draft_s
            if trial_s <= self.credit_s:
                tried = max(idle, key=lambda idx: self._first_chances[reqs[idx]])
                self.by_runner.add(reqs[tried])
                counts[tried], self._was_trial = 1, True
        for req, count in zip(reqs, counts, strict=True):
            if req in self._first_chances and not (count and req in self.by_runner):
                self._own[req].fade()
        return counts

    def checked(self, batch: ScheduleBatch, num_accepted: IntArray, seconds: float, costs: StepCosts) -> None:
        """Learn from a step with drafts.

        Args:
            num_accepted: [B] of each request.
            seconds: that it took to make them.
            costs: of steps; this one is measured.
        """
        num_drafts = np.frombuffer(batch.plan.num_drafts, dtype=np.int32)
        firsts = np.cumsum(num_drafts) - num_drafts
        draft_ids = np.frombuffer(batch.plan.draft_ids, dtype=np.int32)
        made = right = longest = 0
        for idx in np.flatnonzero(num_drafts).tolist():
            if draft_ids[firsts[idx]] == RUNNER_DRAFT:
                count, accepted = int(num_drafts[idx]), int(num_accepted[idx])
                made, right, longest = made + count, right + accepted, max(longest, count)
                self._shared.learn(count, accepted)
                own = self._own.get(batch.reqs[idx])
                if own is not None:
                    own.learn(count, accepted)
        if not made:
            return
        each_s, weight = min(seconds / longest, self._last_draft_s), _COST_WEIGHT
        if math.isinf(self._last_draft_s):
            each_s, weight = min(each_s, self._most_s / _MOST_STEPS), 1.0
        self.draft_s += weight * (each_s - self.draft_s)
        self._last_draft_s = seconds / longest
        intervals = costs.intervals(len(batch), len(batch) + batch.num_drafts)
        verifying_s = (intervals[-1] - intervals[0]) * made / batch.num_drafts
        self.credit_s += float(right * intervals[0] / len(batch) - verifying_s) - each_s * longest

    def passed(self, seconds: float, num_rounds: int, *, plain: bool) -> None:
        """A step of decodes took `seconds`; `plain`: it had no drafts."""
        if plain:
            self._most_s = _MOST_STEPS * seconds / num_rounds
        self.credit_s = min(self.credit_s + _SHARE * seconds, self._most_s)

    def stopped(self, req: Req) -> None:
        """Forget a request that lost its row."""
        self._own.pop(req, None)
