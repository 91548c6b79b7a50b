"""`OutputEstimator`: how much KV memory is reserved for tokens that are not yet generated. One class per rule.

Admission reserves memory for the prompt of a candidate and `expected_of` its output; the `expected` output of the
requests with a row is reserved before that. Too large a reservation leaves the pool empty, too small a one ends in
retractions. An estimate is never a limit: a request that generates more than expected gets pages while there are any.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from ..runtime.config.engine_config import SchedulerConfig
from .arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from .requests.req import Req

CLIP_MAX_NEW_TOKENS: Final = 4096
"""Upper bound on the future tokens that an estimate counts for one request; never a limit on the output."""


class OutputEstimator:
    """The base of all rules; a rule overrides the hooks from which it learns. No clock and no randomness: the same
    calls give the same estimates everywhere.

    Attributes:
        current: the share of its `max_new_tokens` that a request is expected to generate, 0..1, for the report.
    """

    current: float

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """KV slots that the outputs of the requests with a row will still take.

        Args:
            to_come: [B] slots that each output can still take at most. For a partial prefill, the slots after the
                prompt.
            generated: [B] tokens of output so far.
            max_new: [B] each request's `max_new_tokens`.
            ignore_eos: [B] only the limit ends these outputs.
        """
        raise NotImplementedError

    def expected_of(self, req: Req) -> int:
        """KV slots to reserve for the output of a waiting request, beyond the tokens it has already generated."""
        raise NotImplementedError

    def after_decode(self) -> None:
        """A decode step found pages for all running requests."""

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        """Memory ran out; the arguments describe the requests that keep running, the last two are sums."""

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """A request ended by itself, after `output_len` tokens."""

    def reset(self) -> None:
        """No request runs or waits."""


class FullReservation(OutputEstimator):
    """Reserves memory for each request's longest possible output, so no request runs out of memory.

    For clients with tight limits, or without tolerance for a pause (mini-sglang works like this). The cost: if answers
    reach a tenth of their limits, nine tenths of the reserved memory stay empty. For each request with a row, all pages
    that it can still need are reserved:

    A request holds pages for its c computed tokens and can need ceil(m / page) pages in all. Since ceil(m / page) -
    ceil(c / page) <= ceil((m - c) / page), `expected` counts at least the missing pages. A candidate must find memory
    for its prompt, its output and a page, which is at least its pages. Decodes take only pages that were counted.
    """

    current = 1.0

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """All of `to_come`, rounded up to whole pages per request."""
        pages = -(-to_come // self._page_size)
        return float(int(pages.sum()) * self._page_size)

    def expected_of(self, req: Req) -> int:
        return req.max_new_tokens - req.output_len


class GrowOnDemand(OutputEstimator):
    """Reserves nothing for outputs; a page is allocated, or a request retracted, when needed (vLLM V1).

    It runs the most requests at the same time and retracts the most. It suits a large pool with short answers, and
    swapping, which makes a retraction cheap. A prompt must still fit as a whole before it starts: otherwise two prompts
    could each hold half of the memory that the other one needs (vLLM's `full_sequence_must_fit`).
    """

    current = 0.0

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        return 0.0

    def expected_of(self, req: Req) -> int:
        return 0


INITIAL_RATIO: Final = 0.7
MIN_RATIO_FACTOR: Final = 0.14
DECAY_STEPS: Final = 600
RETRACT_LOOKAHEAD_STEPS: Final = 20
"""Tokens that each remaining request is assumed to add before memory is short again."""


class NewTokenRatio(OutputEstimator):
    """The share of their remaining `max_new_tokens` that running requests are expected to generate, in (0, 1].

    Most requests stop long before their limit, so reserving memory for the whole limit would leave most of the pool
    empty; reserving none would cause constant retractions. The ratio starts high, falls with each successful decode
    step, and jumps when memory runs out (sglang:managers/scheduler_components/new_token_ratio_tracker.py). It is a
    share of the remaining tokens, so it applies equally to a request that has just begun and to one nearly done.

    A candidate is counted in full, up to `CLIP_MAX_NEW_TOKENS`; the ratio applies to it from the next pass on. So the
    requests of one pass are not all admitted on an estimate that is not tested yet.

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

    def reset(self) -> None:
        """Return to the initial ratio: the learned one describes requests that are finished."""
        self.current = self._initial


START: Final = 0.5
WINDOW: Final = 100
GROW_AT: Final = 0.8
GROWTH: Final = 1.5

_POWERS: Final = np.cumprod(np.full(64, GROWTH)) / GROWTH  # larger than any number of tokens
_POWERS_LIST: Final[list[float]] = _POWERS.tolist()


class BetaReservation(OutputEstimator):
    """Reserves β·max_new_tokens per request; β is learned from the requests that finished last.

    The rule of the literature on dynamic memory for continuous batching: reserve prompt + β·max_new. When a request has
    used 80 % of its reservation, the reservation grows by half, up to the request's limit. The rule suits clients with
    meaningful limits, because the mean of output / limit is then stable. If all clients send the same huge limit, β is
    small and reservations grow often.

    There is no state per request: the reservation is a function of the number of generated tokens. With b = β·max_new
    it is b·1.5^k for the smallest k with generated < 0.8·b·1.5^k. One search in the table of powers finds k for all
    requests.

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


def make_estimator(config: SchedulerConfig, page_size: int) -> OutputEstimator:
    """The rule that `config.admission_estimator` names."""
    match config.admission_estimator:
        case "ratio":
            return NewTokenRatio(config.schedule_conservativeness)
        case "beta":
            return BetaReservation(config.schedule_conservativeness)
        case "full":
            return FullReservation(page_size)
        case "none":
            return GrowOnDemand()
        case other:
            assert_never(other)
