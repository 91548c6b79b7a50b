"""`BetaReservation`: reserves β·max_new_tokens per request; β is learned from the requests that finished last.

The rule of the literature on dynamic memory for continuous batching: reserve prompt + β·max_new. When a request has
used 80 % of its reservation, the reservation grows by half, up to the request's limit. The rule suits clients with
meaningful limits, because the mean of output / limit is then stable. If all clients send the same huge limit, β is
small and reservations grow often.

There is no state per request: the reservation is a function of the number of generated tokens. With b = β·max_new it
is b·1.5^k for the smallest k with generated < 0.8·b·1.5^k. One search in the table of powers finds k for all requests.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from ..arrays import BoolArray, IntArray
from .ratio import RETRACT_LOOKAHEAD_STEPS

if TYPE_CHECKING:
    from ..requests.req import Req

START: Final = 0.5
WINDOW: Final = 100
GROW_AT: Final = 0.8
GROWTH: Final = 1.5

_POWERS: Final = np.cumprod(np.full(64, GROWTH)) / GROWTH  # larger than any number of tokens
_POWERS_LIST: Final[list[float]] = _POWERS.tolist()


class BetaReservation:
    """See the module.

    Attributes:
        current: β, the mean share of the last 100 requests, times the conservativeness; more after a retraction.
    """

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        # The window begins full of START, so that the first finished requests change β only a little.
        self._shares = deque([START] * WINDOW, maxlen=WINDOW)
        self._raised = 0.0  # lower bound of β since memory ran out; it decays as requests finish
        self.current = 0.0
        self._update()

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """The unused part of each reservation; all of `to_come` where `ignore_eos`."""
        base = np.maximum(max_new * self.current, 1.0)
        num_growths = np.searchsorted(_POWERS, generated / (base * GROW_AT), side="right")
        reserved = np.minimum(np.ceil(base * _POWERS[num_growths]), max_new)
        # the newest token has no KV yet, so one generated token takes as many slots as none
        left = np.where(ignore_eos, to_come, np.clip(reserved - np.maximum(generated, 1), 0, to_come))
        return float(left.sum())  # integers: exact in any order

    def expected_of(self, req: Req) -> int:
        remaining = req.max_new_tokens - req.output_len
        if req.sampling.ignore_eos:
            return remaining
        base = max(req.max_new_tokens * self.current, 1.0)
        num_growths = bisect_right(_POWERS_LIST, req.output_len / (base * GROW_AT))
        reserved = min(math.ceil(base * _POWERS_LIST[num_growths]), req.max_new_tokens)
        return min(max(reserved - req.output_len, 0), remaining)

    def after_decode(self) -> None:
        """Nothing to learn from a step; β is learned from finished requests."""

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        """β was too low: raise it to the share that the remaining requests have generated, plus a margin.

        `NewTokenRatio` does the same. Without it, the retracted requests would be admitted again with the β that was
        too low.
        """
        estimate = (generated_tokens + RETRACT_LOOKAHEAD_STEPS * num_remaining) / (max_new_tokens + 1)
        self._raised = min(1.0, max(self.current, estimate))
        self._update()

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """Add one share to the mean; the oldest is dropped."""
        self._shares.append(min(output_len / max(max_new_tokens, 1), 1.0))
        self._raised *= 1 - 1 / WINDOW
        self._update()

    def reset(self) -> None:
        """Drop only the increase after a retraction; the shares describe the clients and stay valid."""
        self._raised = 0.0
        self._update()

    def _update(self) -> None:
        mean = math.fsum(self._shares) / WINDOW
        self.current = min(max(mean * self._conservativeness, self._raised), 1.0)
