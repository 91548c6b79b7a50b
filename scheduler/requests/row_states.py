"""`RowStates`: the values that every step reads and writes for every request with a row, in arrays indexed by row.

A decode step of 256 requests takes a few array operations instead of 256 attribute accesses. `num_computed` includes
the steps in flight; `num_settled` does not.
"""

from __future__ import annotations

import numpy as np

from ..arrays import BoolArray, IntArray
from .req import Req


class RowStates:
    """Per-row state. R rows.

    Attributes:
        token_ids: [R, max_model_len] prompt and settled output.
        known_len: [R] valid entries of `token_ids`.
        num_computed: [R] tokens with KV, made or being made by a step in flight.
        num_settled: [R] tokens with KV that settled steps made.
        fill_len: [R] tokens known when the row was opened. All of them are computed before the request samples.
        prompt_len: [R].
        max_kv_len: [R] the most KV slots that the request can need; at `num_computed == max_kv_len` no step is left.
        ignore_eos: [R].
        single_step: [R] no multi-step decode: it has its own stop tokens or allowed ones, or wants log-probabilities.
        has_grammar: [R].
        adapter_slot: [R].
        background: [R] as in `GenerateRequest`.
        needs_host_check: [R] `settle` must read the `Req`: one of the two.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        # `zeros` instead of `empty`: the OS maps the matrix on first touch, so unused rows take no memory
        self.token_ids: IntArray = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.known_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_settled: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.fill_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.prompt_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.max_kv_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.ignore_eos: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.single_step: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.has_grammar: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.adapter_slot: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.background: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.needs_host_check: BoolArray = np.zeros(num_rows, dtype=np.bool_)

    def open(self, req: Req, prefix_len: int) -> None:
        """Initialize the row of a request whose first `prefix_len` tokens already have KV."""
        row, sampling = req.row, req.sampling
        self.token_ids[row, : req.fill_len] = np.frombuffer(req.fill_ids, dtype=np.int32)
        self.known_len[row] = req.fill_len
        self.num_computed[row] = prefix_len
        self.num_settled[row] = prefix_len
        self.fill_len[row] = req.fill_len
        self.prompt_len[row] = req.prompt_len
        self.max_kv_len[row] = req.max_kv_len
        self.ignore_eos[row] = sampling.ignore_eos
        self.adapter_slot[row] = req.adapter_slot
        self.background[row] = req.background
        single_step = (
            bool(sampling.stop_token_ids) or sampling.logprobs is not None or req.allowed_ids is not None
        )
        self.single_step[row], self.has_grammar[row] = single_step, req.has_grammar
        self.needs_host_check[row] = single_step or req.has_grammar

    def append(self, rows: IntArray, token_ids: IntArray) -> IntArray:
        """Append one sampled token to each row; returns the new lengths."""
        lengths = self.known_len[rows]
        self.token_ids[rows, lengths] = token_ids
        lengths += 1
        self.known_len[rows] = lengths
        return lengths

    def append_run(self, row: int, token_ids: IntArray) -> None:
        """Append [n] sampled tokens to one row. All but the last have KV, from accepted drafts or from inner steps."""
        start = int(self.known_len[row])
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.known_len[row] = start + len(token_ids)
        self.num_computed[row] += len(token_ids) - 1
        self.num_settled[row] += len(token_ids) - 1

    def known_ids(self, row: int) -> bytes:
        """Prompt and settled output of a row, int32 bytes."""
        return self.token_ids[row, : self.known_len[row]].tobytes()
