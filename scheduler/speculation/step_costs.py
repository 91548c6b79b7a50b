"""`StepCosts`: what a decode step takes, by its number of tokens, as the steps so far have shown.

Nothing is assumed about the device: whether eight tokens cost as much as one (memory is the limit) or eight times as
much (computing is), and from what batch on, is measured. What is not known yet is thought of kindly, so that it is
tried where it would pay, and known from then on: beyond the largest known number of tokens a step costs no more than
that one, and between two known ones the cost rises late (by the square), as it does where memory is the limit first and
computing then. A measurement grows old, since contexts grow and machines have other guests.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from ...runtime.step_plan import MAX_DRAFT_STEP_TOKENS

MAX_TOKENS: Final = MAX_DRAFT_STEP_TOKENS
"""Larger decode steps are not told apart, and have no drafts: computing is the limit there on most devices."""
_WEIGHT: Final = 0.5
_MAX_AGE: Final = 512
"""Decode steps after which a measurement is forgotten: a bad try costs two or three steps' time, so half a percent."""
_NEAR: Final = 1.25
"""A plain step of a batch so much larger or smaller says what one of this size costs."""

Float64s = npt.NDArray[np.float64]


class StepCosts:
    """Seconds of decode steps. The same calls give the same answers: it has no clock."""

    __slots__ = ("_last", "_measured_at", "_num_steps", "_plain_at", "_seconds")

    def __init__(self) -> None:
        self._seconds = np.zeros(MAX_TOKENS + 1)
        self._last = np.zeros(MAX_TOKENS + 1)  # measured, as it was
        self._measured_at = np.full(MAX_TOKENS + 1, -_MAX_AGE)
        self._plain_at = np.full(MAX_TOKENS + 1, -_MAX_AGE)  # by a step without drafts
        self._num_steps = 0

    def measured(self, num_tokens: int, seconds: float, *, plain: bool) -> None:
        """A decode step of so many tokens took so long; `plain`: without drafts."""
        self._num_steps += 1
        if num_tokens > MAX_TOKENS:
            return
        # Now and then a step meets another process, or memory that is touched for the first time: one alone must not
        # rule out a number of tokens for as long as a measurement counts.
        believed = seconds
        if not self._is_old(self._measured_at[num_tokens]):
            before = self._seconds[num_tokens]
            believed = before + _WEIGHT * (min(seconds, self._last[num_tokens]) - before)
        elif self._known().size:
            believed = min(seconds, 3 * self.seconds(num_tokens, num_tokens)[0])
        self._seconds[num_tokens], self._last[num_tokens] = believed, seconds
        self._measured_at[num_tokens] = self._num_steps
        if plain:
            self._plain_at[num_tokens] = self._num_steps

    def knows_plain(self, num_requests: int) -> bool:
        """Whether a step without drafts of about this size was measured lately: what drafts are held against."""
        near = self._plain_at[math.ceil(num_requests / _NEAR) : int(num_requests * _NEAR) + 1]
        return bool((self._num_steps - near < _MAX_AGE).any())

    def seconds(self, first: int, last: int) -> Float64s:
        """What steps of first..last tokens take; last <= MAX_TOKENS, and some number must be known."""
        known = self._known()
        # More tokens never cost less: what a larger step took bounds the smaller ones, whose measurement met trouble.
        bounded = np.minimum.accumulate(self._seconds[known][::-1])[::-1]
        wanted = np.arange(first, last + 1)
        above = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        below = np.maximum(above - 1, 0)
        width = np.maximum(known[above] - known[below], 1)
        part = np.clip((wanted - known[below]) / width, 0.0, 1.0)
        seconds: Float64s = bounded[below] + (bounded[above] - bounded[below]) * part**2
        return seconds

    def _known(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._num_steps - self._measured_at < _MAX_AGE)

    def _is_old(self, measured_at: int) -> bool:
        return self._num_steps - measured_at >= _MAX_AGE
