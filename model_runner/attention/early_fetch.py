"""`EarlyFetch`: whether products fetch what attention is going to read, found out by trying.

It takes up to a tenth off a step where the cache that the cores share keeps what was fetched
(`kernels/cpu/later_reads.h`), and adds a few percent where it does not: other tenants of the machine use that cache,
too, and nobody says how much of it, nor when that changes. So now and then a step does the opposite, and is compared
with the steps before and behind it. Results are the same bits either way.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

MIN_TOKENS: Final = 16
"""Of a step that fetches early: products of fewer wait for memory themselves."""

MIN_INTERVAL: Final = 3
MAX_INTERVAL: Final = 48
"""Steps from one trial to the next. They become rarer while trials agree with what is done."""

_WEIGHT: Final = 0.25
_ENOUGH: Final = -0.015
"""What is done changes when the opposite takes so much less time, on a moving average of trials with that weight."""

_LARGEST: Final = 0.05
"""A difference counts as no more than that, so one alone changes nothing: some third process may have had the core."""


class _Step(NamedTuple):
    num_tokens: int
    is_trial: bool
    seconds: float


class EarlyFetch:
    """One for all plans of a model's attention.

    Attributes:
        most_bytes: of a layer's keys and values that are fetched early; 0: nothing ever is.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most_bytes = most_bytes
        self._clock = clock
        self._bytes = np.zeros(1, dtype=np.int64)
        self._is_on = most_bytes > 0
        self._interval = MIN_INTERVAL
        self._since_trial = 0
        self._difference = 0.0
        self._steps: deque[_Step] = deque(maxlen=3)

    @property
    def address(self) -> int:
        """Of the int64 that says how many bytes the step that is planned next may fetch; as long as this lives."""
        return int(self._bytes.ctypes.data)

    def allow(self, is_on: bool) -> None:
        """For the steps that are planned from now on."""
        self._bytes[0] = self.most_bytes if is_on else 0

    def run(self, step: Callable[[], None], num_tokens: int) -> None:
        """Run a step in which everybody decodes, its planning included."""
        if num_tokens < MIN_TOKENS or not self.most_bytes:
            self.allow(False)
            step()
            return
        self._since_trial += 1
        is_trial = self._since_trial >= self._interval
        self.allow(self._is_on != is_trial)
        started_s = self._clock()
        step()
        self._steps.append(_Step(num_tokens, is_trial, self._clock() - started_s))
        self.allow(self._is_on)  # in steps that are not run by this, too
        if is_trial:
            self._since_trial = 0
        self._compare()

    def _compare(self) -> None:
        """The last but one step with its neighbours, if it was a trial and they had as much to do."""
        if len(self._steps) < 3:
            return
        before, trial, behind = self._steps
        if not trial.is_trial or not before.num_tokens == trial.num_tokens == behind.num_tokens:
            return
        difference = 2 * trial.seconds / (before.seconds + behind.seconds) - 1
        difference = min(max(difference, -_LARGEST), _LARGEST)
        self._difference += _WEIGHT * (difference - self._difference)
        self._interval = min(2 * self._interval, MAX_INTERVAL)
        if self._difference < _ENOUGH:
            self._change(trial.num_tokens)

    def _change(self, num_tokens: int) -> None:
        self._is_on = not self._is_on
        logger.info(
            "early_fetch=%s: steps of %d tokens take %.1f%% less time so",
            "on" if self._is_on else "off",
            num_tokens,
            -100 * self._difference,
        )
        self._difference = -self._difference
        self._interval = MIN_INTERVAL
        self._steps.clear()
