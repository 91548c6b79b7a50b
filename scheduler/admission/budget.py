"""`PrefillBudget`: how much prefill one pass may still admit, in KV memory and in tokens to compute.

`Reservations` counts the memory that requests with a row will still need, which the budget subtracts.
"""

from __future__ import annotations

import math

import numpy as np

from ..arrays import IntArray
from ..estimator import OutputEstimator
from ..records.decision_log import BudgetState
from ..requests.req import Req
from ..requests.requests import Requests
from ..requests.row_states import RowStates
from ..step_size.step_limits import reserved_tokens
from ..step_size.step_target import UNLIMITED, PromptTime


class Reservations:
    """KV slots that the requests with a row will still need, beyond the pages they hold. Reads; changes nothing.

    The rest of the prompts counts in full, the outputs as the estimator expects them.
    """

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

    def leave_room(self, needed_pages: int, available_pages: int) -> bool:
        """Whether pages can be had without taking those that running requests will probably need."""
        if needed_pages > available_pages:
            return False
        if not self._requests.num_with_row:
            return True
        return (available_pages - needed_pages) * self._page_size >= self.total_tokens()

    def tokens_of(self, req: Req) -> int:
        """The part of `total_tokens` for one request with a row, rounded down."""
        rows = np.array([req.row], dtype=np.int32)
        remaining = np.maximum(self._states.fill_len[rows] - self._states.num_computed[rows], 0)
        return reserved_tokens(remaining, self._page_size) + int(self._output(rows))

    def _output(self, rows: IntArray) -> float:
        states = self._states
        max_new = states.max_kv_len[rows] - states.prompt_len[rows] + np.int32(1)
        generated = states.known_len[rows] - states.prompt_len[rows]
        # A partial prefill is already reserved in full, so only the slots after the prompt count here.
        to_come = states.max_kv_len[rows] - np.maximum(states.num_computed[rows], states.fill_len[rows])
        return self._estimator.expected(to_come, generated, max_new, states.ignore_eos[rows])


class PrefillBudget:
    """Tokens that may still be reserved in this pass (sglang:mem_cache/prefill_budget.py).

    Attributes:
        rem_total_tokens: available KV memory minus the reservations: the expected output of the running requests,
            and the rest and the expected output of the partial prefills.
        cur_rem_tokens: available KV memory as it is now.
        rem_input_tokens: prompt tokens the step may still compute.
        rem_chunk_tokens: the same by the chunk size; `UNLIMITED` when prompts are never cut.
        cuts_prompts: whether a prompt may be computed in several steps.
        allows_oversized: whether a prompt that is never cut may exceed the budget if it is alone in the step.
        time: what the step's prompts may take, in seconds; see `StepTarget`.

    The pages for the step's decodes are taken before the pass, so the available memory does not contain them; SGLang
    subtracts them here. Decodes count toward the limits on prompt tokens, but at least a page remains for prompts, so
    that many running requests cannot block every prompt. For the limit on all tokens of a step see `decodes_first`.

    Another difference from SGLang: a prompt that is cut reserves all of its memory when it is admitted. SGLang counts
    only the chunk. Later requests then take the memory that the other chunks need, and the partial prefill, which has
    the least work to lose, is retracted again and again.
    """

    __slots__ = (
        "allows_oversized",
        "cur_rem_tokens",
        "cuts_prompts",
        "page_size",
        "rem_chunk_tokens",
        "rem_input_tokens",
        "rem_total_tokens",
        "time",
    )

    def __init__(
        self,
        *,
        page_size: int,
        available_tokens: int,
        expected_tokens: float,
        max_prefill_tokens: int,
        chunk_size: int | None,
        num_decodes: int,
        max_num_batched_tokens: int | None = None,
        decodes_first: bool = False,
        time: PromptTime | None = None,
    ) -> None:
        """Start a pass.

        Args:
            available_tokens: KV slots that are free or can be evicted.
            expected_tokens: slots reserved for the requests with a row.
            max_prefill_tokens: prompt tokens of a step.
            chunk_size: the same if prompts are cut; None if they are not.
            num_decodes: running requests that compute a token each in the same step.
            max_num_batched_tokens: tokens of a step, prompts and decodes; None for no such limit. It is a further bound
                on `rem_input_tokens`.
            decodes_first: under that limit prompts get only the tokens that the decodes do not use, possibly none, as
                in vLLM V1. The step never exceeds the limit; prompts continue as running requests end. If False,
                prompts get at least a page of each step, so that the first token of a new request is not delayed until
                running requests end. A step without decodes always has room for a page: with a smaller limit the
                engine would make no progress.
            time: seconds that prompts may take; unlimited if None.
        """
        self.time = time if time is not None else PromptTime.unlimited()
        self.page_size = page_size
        self.cur_rem_tokens = available_tokens
        self.rem_total_tokens = available_tokens - math.ceil(expected_tokens)
        self.cuts_prompts = chunk_size is not None
        self.rem_chunk_tokens = UNLIMITED if chunk_size is None else max(chunk_size - num_decodes, page_size)
        self.rem_input_tokens = max(max_prefill_tokens - num_decodes, page_size)
        self.allows_oversized = True
        if max_num_batched_tokens is not None:
            nothing_left = decodes_first and num_decodes > 0
            least = 0 if nothing_left else page_size
            self.rem_input_tokens = min(
                self.rem_input_tokens, max(max_num_batched_tokens - num_decodes, least)
            )
            self.allows_oversized = not nothing_left

    def state(self) -> BudgetState:
        """A copy of the figures."""
        return BudgetState(
            self.rem_total_tokens, self.cur_rem_tokens, self.rem_input_tokens, self.rem_chunk_tokens
        )

    @property
    def rem_step_tokens(self) -> int:
        """Tokens that this step may still compute."""
        return min(self.rem_input_tokens, self.rem_chunk_tokens)

    def pin(self, num_tokens: int) -> None:
        """Count a cached prefix that was locked: its `num_tokens` are no longer evictable."""
        self.rem_total_tokens -= num_tokens
        self.cur_rem_tokens -= num_tokens

    def reserve(self, extend_len: int, later_len: int, restored_len: int = 0) -> None:
        """Count an admission: whole pages for the tokens of this step, one page for rounding, and later tokens.

        Args:
            extend_len: prompt tokens that the step computes.
            later_len: the rest of the prompt and the expected output.
            restored_len: tokens before those that take memory but are not computed: their KV is copied.
        """
        self.rem_total_tokens -= self._take(extend_len, restored_len) + later_len

    def take_reserved(self, extend_len: int) -> None:
        """Count another chunk of a partial prefill; `expected_tokens` already contains the whole prompt."""
        self._take(extend_len, 0)

    def extend(self, extra_len: int) -> None:
        """Count the extension of a chunk of this pass, which ends at a page; its memory is already reserved."""
        self.cur_rem_tokens -= -(-extra_len // self.page_size) * self.page_size
        self._compute(extra_len)

    def give_back(self, available_tokens: int, expected_tokens: int) -> None:
        """Count the memory of requests that were retracted during the pass.

        Args:
            available_tokens: KV slots that became free or evictable.
            expected_tokens: slots that were reserved for their output.
        """
        self.cur_rem_tokens += available_tokens
        self.rem_total_tokens += available_tokens + expected_tokens

    def _take(self, extend_len: int, restored_len: int) -> int:
        tokens = -(-(restored_len + extend_len) // self.page_size) * self.page_size + self.page_size
        self.cur_rem_tokens -= tokens
        self._compute(extend_len)
        return tokens

    def _compute(self, num_tokens: int) -> None:
        self.rem_input_tokens -= num_tokens
        self.rem_chunk_tokens -= num_tokens
