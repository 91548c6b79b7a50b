"""`TokenRelay`: the last sampled token of each pool row, kept on the device.

It feeds a step's tokens into the next one without a visit to the host, so that step N+1 can be launched before the
host has seen the tokens of step N.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenRelay:
    """One token id per pool row; rows never sampled hold 0."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._last = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def store(self, rows: Tensor, token_ids: Tensor) -> None:
        """Remember what was sampled: [S] int64 rows, each once, and [S] int64 tokens."""
        self._last.index_copy_(0, rows, token_ids)

    def fill(self, input_ids: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Put the last tokens of `rows` [n] into `input_ids` [T] at `indices` [n]; all int64."""
        input_ids.index_copy_(0, indices, self._last.index_select(0, rows))
