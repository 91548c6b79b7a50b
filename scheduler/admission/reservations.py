"""`Reservations`: KV slots that the requests with a row will still need, beyond the pages they hold."""

from __future__ import annotations

import numpy as np

from ..arrays import IntArray
from ..estimator.base import OutputEstimator
from ..requests.req import Req
from ..requests.requests import Requests
from ..requests.row_states import RowStates
from ..step_size.partial_prefills import reserved_tokens


class Reservations:
    """The rest of the prompts in full, and the outputs as the estimator expects them. Reads; changes nothing."""

    def __init__(
        self, requests: Requests, states: RowStates, estimator: OutputEstimator, page_size: int
    ) -> None:
        self._requests = requests
        self._states = states
        self._estimator = estimator
        self._page_size = page_size

    def total_tokens(self) -> float:
        """KV slots that all requests with a row will still take."""
        states, partial = self._states, self._requests.partial
        rows = self._requests.running.rows
        if not partial:
            return self._output(rows)
        partial_rows = np.array([req.row for req in partial], dtype=np.int32)
        remaining = states.fill_len[partial_rows] - states.num_computed[partial_rows]
        rest = reserved_tokens(remaining, self._page_size)
        return rest + self._output(np.concatenate([rows, partial_rows]))

    def output_tokens_of(self, req: Req) -> int:
        """The part of `total_tokens` for the output of one running request, rounded down."""
        return int(self._output(np.array([req.row], dtype=np.int32)))

    def _output(self, rows: IntArray) -> float:
        states = self._states
        max_new = states.max_kv_len[rows] - states.prompt_len[rows] + np.int32(1)
        generated = states.known_len[rows] - states.prompt_len[rows]
        # A partial prefill is already reserved in full, so only the slots after the prompt count here.
        to_come = states.max_kv_len[rows] - np.maximum(states.num_computed[rows], states.fill_len[rows])
        return self._estimator.expected(to_come, generated, max_new, states.ignore_eos[rows])
