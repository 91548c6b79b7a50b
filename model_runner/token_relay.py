"""`TokenRelay`: the last sampled token of each pool row, kept on the device.

It passes a step's tokens to the next step on the device, so step N+1 can be launched before the host has received the
tokens of step N.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class TokenRelay:
    """One token id per pool row, and one for the dummy row after them; rows never sampled hold 0."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._last = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._last_np = self._last.numpy() if device.type == "cpu" else None

    def on_host(self) -> npt.NDArray[np.int64]:
        """[rows + 1] a view of the tokens; only if the device is the CPU."""
        assert self._last_np is not None
        return self._last_np

    def store(self, rows: Tensor, token_ids: Tensor) -> None:
        """Store the sampled tokens: [S] int64 rows, without repeats, and [S] int64 tokens."""
        if self._last_np is None:
            self._last.index_copy_(0, rows, token_ids)
        else:  # with cold caches, as between two steps, an operation of torch takes some 40 us
            self._last_np[rows.numpy()] = token_ids.numpy()

    def fill(self, input_ids: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Write the last tokens of `rows` [n] into `input_ids` [T] at `indices` [n]; all int64."""
        if self._last_np is None:
            input_ids.index_copy_(0, indices, self._last.index_select(0, rows))
        else:
            input_ids.numpy()[indices.numpy()] = self._last_np[rows.numpy()]

    def input_ids(self, known_ids: Tensor, rows: Tensor) -> Tensor:
        """The tokens `known_ids` [n]; where they are negative, the last tokens of `rows` [n]; all int64."""
        return torch.where(known_ids < 0, self._last.index_select(0, rows), known_ids)
