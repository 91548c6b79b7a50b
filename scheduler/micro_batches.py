"""`MicroBatches`: divides the running requests among the steps in flight, so that all pipeline stages have work.

With n stages a step may have one n-th of the running requests, and none with a last token that is not settled. A step
that ends makes its requests ready again, so n steps with about equal parts follow each other. A request that is left
over because more are ready is in the next step: those that waited longest are taken first.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from .arrays import IntArray
from .requests.req import Req
from .requests.row_states import RowStates


class MicroBatches(Protocol):
    """Chooses the decodes of a step."""

    def choose(self, rows: IntArray, reqs: list[Req], num_running: int) -> tuple[IntArray, list[Req]]:
        """Choose the requests that decode in this step, in the same order.

        Args:
            rows: [B] of the requests that have a token to compute, or will have when their last one is settled.
            reqs: [B] the same requests.
            num_running: B and the requests with their last token in flight.
        """
        ...


class OneMicroBatch:
    """All requests decode in each step; their tokens are on the device before the step needs them."""

    def choose(self, rows: IntArray, reqs: list[Req], num_running: int) -> tuple[IntArray, list[Req]]:
        return rows, reqs


class StageMicroBatches:
    """See the module."""

    def __init__(self, states: RowStates, num_stages: int) -> None:
        """Take the number of stages, 2 or more."""
        self._states = states
        self._num_stages = num_stages
        self._num_chosen = 0
        self._turn_of_row = np.zeros(len(states.known_len), dtype=np.int64)  # when it was chosen last

    def choose(self, rows: IntArray, reqs: list[Req], num_running: int) -> tuple[IntArray, list[Req]]:
        states, most = self._states, -(-num_running // self._num_stages)
        ready = np.flatnonzero(states.num_computed[rows] < states.known_len[rows])
        if len(ready) > most:
            longest = np.argsort(self._turn_of_row[rows[ready]], kind="stable")[:most]
            ready = ready[np.sort(longest)]
        self._num_chosen += 1
        self._turn_of_row[rows[ready]] = self._num_chosen
        return rows[ready], [reqs[idx] for idx in ready.tolist()]


ONE_MICRO_BATCH: Final = OneMicroBatch()


def make_micro_batches(states: RowStates, num_stages: int) -> MicroBatches:
    """Those for this number of pipeline stages."""
    return ONE_MICRO_BATCH if num_stages == 1 else StageMicroBatches(states, num_stages)
