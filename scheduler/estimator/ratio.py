"""`NewTokenRatio`: the share of their remaining `max_new_tokens` that running requests are expected to generate.

Most requests stop long before their limit, so reserving memory for the whole limit would leave most of the pool empty;
reserving none would cause constant retractions. The ratio starts high, falls with each successful decode step, and
jumps when memory runs out (sglang:managers/scheduler_components/new_token_ratio_tracker.py). It is a share of the
remaining tokens, so it applies equally to a request that has just begun and to one that is nearly done.

A candidate is counted in full, up to `CLIP_MAX_NEW_TOKENS`; the ratio applies to it from the next pass on. So the
requests of one pass are not all admitted on an estimate that is not tested yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..arrays import BoolArray, IntArray
from .base import CLIP_MAX_NEW_TOKENS

if TYPE_CHECKING:
    from ..requests.req import Req

INITIAL_RATIO: Final = 0.7
MIN_RATIO_FACTOR: Final = 0.14
DECAY_STEPS: Final = 600
RETRACT_LOOKAHEAD_STEPS: Final = 20
"""Tokens that each remaining request is assumed to add before memory is short again."""


class NewTokenRatio:
    """A number in (0, 1].

    Attributes:
        current: the ratio.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._min = min(self._initial * MIN_RATIO_FACTOR, 1.0)
        self._decay = (self._initial - self._min) / DECAY_STEPS
        self.current = self._initial

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """`current` times `to_come`, all of it where `ignore_eos`; at most `CLIP_MAX_NEW_TOKENS` of a request."""
        clipped = np.minimum(to_come, CLIP_MAX_NEW_TOKENS)
        surely = int(clipped[ignore_eos].sum())  # sums of integers: the same on every machine
        return surely + self.current * (int(clipped.sum()) - surely)

    def expected_of(self, req: Req) -> int:
        return min(req.max_new_tokens - req.output_len, CLIP_MAX_NEW_TOKENS)

    def after_decode(self) -> None:
        """Lower the ratio by one step of the decay."""
        self.current = max(self.current - self._decay, self._min)

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        """Raise the ratio to the share that the remaining requests have generated, plus a margin.

        It never falls here. SGLang uses the estimate unchanged; for young requests with high limits it is far below
        the ratio that was just too low, so more requests would be admitted after each retraction.
        """
        estimate = (generated_tokens + RETRACT_LOOKAHEAD_STEPS * num_remaining) / (max_new_tokens + 1)
        self.current = min(1.0, max(self.current, estimate))

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """Nothing to learn from a single request."""

    def reset(self) -> None:
        """Return to the initial ratio: the learned one describes requests that are finished."""
        self.current = self._initial
