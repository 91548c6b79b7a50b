"""`EarlyFetch`: whether products fetch what attention is going to read, found out by trying.

It takes up to a tenth off a step where the cache that the cores share keeps what was fetched
(`kernels/cpu/later_reads.h`), and adds a few percent where it does not: other tenants of the machine use that cache,
too, and nobody says how much of it, nor when that changes. So now and then a step does the opposite, and is compared
with the steps before and behind it. Results are the same bits either way.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

MIN_TOKENS: Final = 24
"""Of a step that fetches early: in products of fewer nobody has the time to, or they wait for memory themselves."""

MIN_INTERVAL: Final = 3
MAX_INTERVAL: Final = 48
"""Steps from one trial to the next. They become rarer while trials agree with what is done."""

_WEIGHT: Final = 0.125
_ENOUGH: Final = -0.01
"""What is done changes when the opposite takes so much less time, on a moving average of trials with that weight."""

_PATIENCE: Final = 3
"""Steps that announce something of which no product fetches anything: after so many, none ever will."""

_LARGEST: Final = 0.05
"""A trial's difference counts as no more than that, and none whose neighbours differ by more: some third process may
have had the core."""


class Early(ctypes.Structure):
    """As `kernels/cpu/attention_plan.h` has it.

    Attributes:
        most_bytes: of a layer's keys and values that the step that is planned next may fetch early.
        announced, taken: stretches of keys, or of values, so far.
    """

    _fields_ = (("most_bytes", ctypes.c_int64), ("announced", ctypes.c_int64), ("taken", ctypes.c_int64))


class EarlyFetch:
    """One for all plans of a model's attention.

    Attributes:
        most_bytes: of a layer's keys and values that are fetched early; 0: nothing ever is. It becomes that where no
            product fetches any, as those with other weights than bfloat16 do not.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most_bytes = most_bytes
        self._clock = clock
        self._early = Early()
        self._num_unheard = 0
        self._habits: dict[int, _Habit] = {}
        self._last = _Step(0, False, 0.0)

    @property
    def address(self) -> int:
        """Of the `Early` that plans read and write; as long as this lives."""
        return ctypes.addressof(self._early)

    @property
    def num_taken(self) -> int:
        """Stretches of keys, or of values, that products have fetched so far."""
        return int(self._early.taken)

    def allow(self, is_on: bool) -> None:
        """For the steps that are planned from now on."""
        self._early.most_bytes = self.most_bytes if is_on else 0

    def run(self, step: Callable[[], None], num_tokens: int) -> None:
        """Run a step in which everybody decodes, its planning included. It should take as long as others of its size.

        What steps of this size usually do holds for those that are run by others, until the next call.
        """
        if num_tokens < MIN_TOKENS or not self.most_bytes:
            self.allow(False)
            step()
            return
        habit = self._habits.setdefault(num_tokens.bit_length(), _Habit())
        last = self._last
        is_trial = habit.wants_trial() and last.num_tokens == num_tokens
        self.allow(habit.is_on != is_trial)
        announced_before = self._early.announced
        started_s = self._clock()
        try:
            step()
        finally:
            self.allow(habit.is_on)
        seconds = self._clock() - started_s
        if not self.num_taken and self._early.announced > announced_before:
            self._was_not_heard()
        self._last = _Step(num_tokens, is_trial, seconds)
        if is_trial:
            habit.begin(last.seconds, seconds)
        elif last.is_trial and last.num_tokens == num_tokens:
            habit.end(seconds, num_tokens)

    def _was_not_heard(self) -> None:
        """Stretches were announced, and nobody has fetched any: so it is where a model's weights are of other kinds."""
        self._num_unheard += 1
        if self._num_unheard == _PATIENCE:
            logger.info("early_fetch=off: no product of this model fetches anything early")
            self.most_bytes = 0
            self.allow(False)


class _Step(NamedTuple):
    """What was run last; 0 tokens: nothing."""

    num_tokens: int
    is_trial: bool
    seconds: float


class _Habit:
    """What steps of about one size do.

    Attributes:
        is_on: whether they fetch early.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._interval = MIN_INTERVAL
        self._since_trial = 0
        self._difference = 0.0
        self._before_s = self._trial_s = 0.0

    def wants_trial(self) -> bool:
        """Whether it is time; asked at each step. Never at two in a row."""
        self._since_trial += 1
        return self._since_trial >= self._interval

    def begin(self, before_s: float, trial_s: float) -> None:
        """A trial has been made; what the step before it took, and what it took itself."""
        self._since_trial = 0
        self._before_s, self._trial_s = before_s, trial_s

    def end(self, behind_s: float, num_tokens: int) -> None:
        """The step behind it took so long, and all three had as much to do."""
        usual_s = (self._before_s + behind_s) / 2
        if abs(behind_s - self._before_s) > _LARGEST * usual_s:
            return
        difference = min(max(self._trial_s / usual_s - 1, -_LARGEST), _LARGEST)
        self._difference += _WEIGHT * (difference - self._difference)
        self._interval = min(2 * self._interval, MAX_INTERVAL)
        if self._difference > _ENOUGH:
            return
        self.is_on = not self.is_on
        self._difference = -self._difference
        self._interval = max(self._interval // 4, MIN_INTERVAL)
        logger.info(
            "early_fetch=%s for some %d tokens: steps take less time so",
            "on" if self.is_on else "off",
            num_tokens,
        )
