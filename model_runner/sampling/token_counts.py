"""`TokenCounts`: the token counts of a request's prompt and output, on the device, for the penalties.

Only requests with penalties have counts. Sampled tokens are counted on the device, so penalties are correct before the
host has received the last token.
"""

# Shapes: N requests with penalties, V tokens of the vocabulary.

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..memory.io_buffers import InputBuffers


class TokenCounts:
    """One line of V counts per request with penalties; memory grows to the largest number of them at one time.

    Attributes:
        in_prompt: [N, V] bool.
        in_output: [N, V] int32, occurrences.
        buffers: the uploads to their device.
    """

    def __init__(self, vocab_size: int, buffers: InputBuffers) -> None:
        self.buffers = buffers
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=buffers.device)
        self.in_output = torch.zeros((0, vocab_size), dtype=torch.int32, device=buffers.device)

    def add(self, row: int, prompt_ids: npt.NDArray[np.int32], output_ids: npt.NDArray[np.int32]) -> None:
        """Start counting for the request in `row`; for a retracted request, `output_ids` is its output so far.

        If memory runs out at any point, the call may be repeated.
        """
        if not self._free:
            self._grow()
        slot, put = self._free[-1], self.buffers.put
        self.in_prompt[slot].zero_().index_fill_(0, put(prompt_ids.astype(np.int64)), True)
        counts = np.bincount(output_ids, minlength=self.in_output.shape[1]).astype(np.int32)
        self.in_output[slot].copy_(put(counts))
        self._slot_of[row] = self._free.pop()

    def remove(self, row: int) -> None:
        """Stop counting; a row without counts is ignored."""
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def slots(self, rows: Iterable[int]) -> npt.NDArray[np.int64]:
        """Index into the count tensors for each of `rows`."""
        return np.fromiter((self._slot_of[row] for row in rows), dtype=np.int64)

    def observe(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count newly sampled tokens: [n] int64 slots, each once, and [n] int64 tokens."""
        self.in_output[slots, token_ids] += 1

    def _grow(self) -> None:
        old = self.in_prompt.shape[0]
        new = max(4, 2 * old)
        # Assigned together: memory may suffice for one of the two only.
        self.in_prompt, self.in_output = _with_rows(self.in_prompt, new), _with_rows(self.in_output, new)
        self._free.extend(range(new - 1, old - 1, -1))


def _with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    grown = tensor.new_zeros((num_rows, tensor.shape[1]))
    grown[: tensor.shape[0]] = tensor
    return grown
