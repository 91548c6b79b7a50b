"""`StepCosts`: the measured time of a decode step by its number of tokens.

Nothing is assumed about the device: eight tokens may cost as much as one (memory is the limit) or eight times as much
(computing is the limit), and the measurements show which, and from what batch size on. Unknown costs are estimated
optimistically, so that a promising size is tried and then known. Above the largest measured number of tokens a
step is assumed to cost as much as that one. Between two measured numbers the cost rises late (by the square), as it
does when memory is the limit first and computing is later. Measurements expire, because contexts grow and other
programs run on the machine.

Beside its forward passes a step costs the work between two steps: planning, settling, sending, and the processes that
forward a token. A step with drafts has this work for each forward pass, a multi-step decode once for several, so it is
measured apart from the forward passes, as the rest of the interval between two settles.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from ...runtime.step_plan import MAX_DRAFT_STEP_TOKENS

MAX_TOKENS: Final = MAX_DRAFT_STEP_TOKENS
"""Larger decode steps are not measured and have no drafts: computing is their limit on most devices."""
_WEIGHT: Final = 0.5
_MAX_AGE: Final = 512
"""Decode steps until a measurement expires: a bad exploration step costs the time of two or three steps (0.5 %)."""
_FIRST_TRUST: Final = 8
"""The same of the first plain step of a size, which is often slow; it doubles with each further one.

The second and third replace the first, without a weight for what was believed before.
"""
_NEAR: Final = 1.25
"""A plain step counts as measured if a batch up to this factor larger or smaller was measured."""

Float64s = npt.NDArray[np.float64]


class StepCosts:
    """Seconds of decode steps. It has no clock: the same calls give the same answers."""

    def __init__(self) -> None:
        self._seconds = np.zeros(MAX_TOKENS + 1)
        self._last = np.zeros(MAX_TOKENS + 1)  # the last measurement, not averaged
        self._measured_at = np.full(MAX_TOKENS + 1, -_MAX_AGE)
        self._plain_at = np.full(MAX_TOKENS + 1, -_MAX_AGE)  # by a step without drafts
        self._trusted = np.zeros(MAX_TOKENS + 1, dtype=np.int64)  # decode steps that a plain step is believed
        self._num_steps = 0
        self._between_s = self._last_between_s = 0.0
        self._num_rounds = 1.0  # of steps without drafts; a moving average

    def measured(
        self, num_tokens: int, seconds: float, *, plain: bool, between_s: float = 0.0, num_rounds: int = 1
    ) -> None:
        """A decode step was settled.

        Args:
            seconds: of one forward pass of `num_tokens`.
            plain: it had no drafts.
            between_s: of the interval since the last settle, the part without forward passes.
            num_rounds: its forward passes; above 1 only for a multi-step decode.
        """
        self._num_steps += 1
        # The smaller of the last two, so that a pause or a burst of messages before one step says nothing.
        self._between_s += _WEIGHT * (min(between_s, self._last_between_s) - self._between_s)
        self._last_between_s = between_s
        if plain:
            self._num_rounds += _WEIGHT * (num_rounds - self._num_rounds)
        if num_tokens > MAX_TOKENS:
            return
        # Another process, or memory that is touched for the first time, sometimes delays a step. A single slow step
        # must not exclude a number of tokens until the measurement expires.
        believed, before = seconds, self._seconds[num_tokens]
        is_old = self._is_old(self._measured_at[num_tokens])
        if plain:
            trusted = 0 if is_old else 2 * self._trusted[num_tokens]
            self._trusted[num_tokens] = min(max(trusted, _FIRST_TRUST), _MAX_AGE)
        if plain and not is_old and self._trusted[num_tokens] <= 4 * _FIRST_TRUST:
            believed = min(seconds, self._last[num_tokens])
        elif not is_old:
            believed = before + _WEIGHT * (min(seconds, self._last[num_tokens]) - before)
        elif self._known().size:
            believed = min(seconds, 3 * self.seconds(num_tokens, num_tokens)[0])
        self._seconds[num_tokens], self._last[num_tokens] = believed, seconds
        self._measured_at[num_tokens] = self._num_steps
        if plain:
            self._plain_at[num_tokens] = self._num_steps

    def knows_plain(self, num_requests: int) -> bool:
        """Whether a plain step of about this size was measured recently; drafts are compared with it."""
        near = slice(math.ceil(num_requests / _NEAR), int(num_requests * _NEAR) + 1)
        return bool((self._num_steps - self._plain_at[near] < self._trusted[near]).any())

    def seconds(self, first: int, last: int) -> Float64s:
        """Seconds of steps with first..last tokens; last <= MAX_TOKENS, and at least one size must be measured."""
        known = self._known()
        # More tokens never cost less: a larger step bounds smaller ones with a delayed measurement.
        bounded = np.minimum.accumulate(self._seconds[known][::-1])[::-1]
        wanted = np.arange(first, last + 1)
        above = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        below = np.maximum(above - 1, 0)
        width = np.maximum(known[above] - known[below], 1)
        part = np.clip((wanted - known[below]) / width, 0.0, 1.0)
        seconds: Float64s = bounded[below] + (bounded[above] - bounded[below]) * part**2
        return seconds

    def intervals(self, num_reqs: int, last: int) -> Float64s:
        """Seconds per forward pass, with the work between steps, of decodes of `num_reqs` requests.

        The first entry is the plain step of `num_reqs` tokens, the others are steps with drafts, up to `last` tokens.
        """
        intervals = self.seconds(num_reqs, last) + self._between_s
        intervals[0] -= self._between_s * (1 - 1 / self._num_rounds)
        return intervals

    def _known(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._num_steps - self._measured_at < _MAX_AGE)

    def _is_old(self, measured_at: int) -> bool:
        return self._num_steps - measured_at >= _MAX_AGE
