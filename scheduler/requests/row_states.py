"""`RowStates`: what every step reads and writes of every request that has a row, in arrays indexed by row.

A decode step of 256 requests is a handful of array operations here instead of 256 attribute accesses. Lengths that are
*planned* run ahead of those that are *settled* by the steps in flight.
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
        num_computed: [R] tokens whose KV exists or is being made by a step in flight.
        num_settled: [R] tokens whose KV was made by settled steps.
        fill_len: [R] tokens that were known when the row was opened: all of them are computed before it samples.
        prompt_len: [R].
        max_kv_len: [R] KV slots the request can need at most; a row with `num_computed` there needs no more steps.
        ignore_eos: [R].
        needs_host_check: [R] settling must look at the request itself: own stop tokens, log-probabilities.
    """

    __slots__ = (
        "fill_len",
        "ignore_eos",
        "known_len",
        "max_kv_len",
        "needs_host_check",
        "num_computed",
        "num_settled",
        "prompt_len",
        "token_ids",
    )

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        # zeros, not empty: the pages of the matrix are mapped when first touched, so unused rows cost no memory
        self.token_ids: IntArray = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.known_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_settled: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.fill_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.prompt_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.max_kv_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.ignore_eos: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.needs_host_check: BoolArray = np.zeros(num_rows, dtype=np.bool_)

    def open(self, req: Req, prefix_len: int) -> None:
        """Start the row of a request whose first `prefix_len` tokens have KV already."""
        row, sampling = req.row, req.sampling
        self.token_ids[row, : req.fill_len] = np.frombuffer(req.fill_ids, dtype=np.int32)
        self.known_len[row] = req.fill_len
        self.num_computed[row] = prefix_len
        self.num_settled[row] = prefix_len
        self.fill_len[row] = req.fill_len
        self.prompt_len[row] = req.prompt_len
        self.max_kv_len[row] = req.max_kv_len
        self.ignore_eos[row] = sampling.ignore_eos
        self.needs_host_check[row] = bool(sampling.stop_token_ids) or sampling.logprobs is not None

    def append(self, rows: IntArray, token_ids: IntArray) -> IntArray:
        """Append one sampled token to each row; returns the new lengths."""
        lengths = self.known_len[rows]
        self.token_ids[rows, lengths] = token_ids
        lengths += 1
        self.known_len[rows] = lengths
        return lengths

    def append_run(self, row: int, token_ids: IntArray) -> None:
        """Append [n] sampled tokens to one row. The KV of all but the last exists: of right drafts, or of rounds."""
        start = int(self.known_len[row])
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.known_len[row] = start + len(token_ids)
        self.num_computed[row] += len(token_ids) - 1
        self.num_settled[row] += len(token_ids) - 1

    def known_ids(self, row: int) -> bytes:
        """Prompt and settled output of a row, int32 bytes."""
        return self.token_ids[row, : self.known_len[row]].tobytes()
