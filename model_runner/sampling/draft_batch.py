"""`DraftBatch`: the drafts of a step, and their verification on the device.

A request with k drafts has 1 + k rows of logits, one for its last token and one for each draft. The token sampled from
a row follows the row's input token. A draft is accepted if all drafts before it are accepted and the row before it has
sampled the same token. The valid tokens are those up to the first row that does not sample the next draft, or up to the
last row:

    input     last  d1  d2  d3
    expected  d1    d2  d3  -          d1 = a and d2 = b are accepted, d3 is not c: the valid tokens are a, b and c,
    sampled   a     b   c   y          and c is the new last token
"""

# Shapes: S requests that sample in this step, R rows of logits: one for each request, and one for each draft.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..memory.io_buffers import InputBuffers

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_NO_DRAFT: Final = -1
"""Differs from every token id."""


class Checked(NamedTuple):
    """The result of the verification; on the device.

    Attributes:
        num_tokens: [S] int64, the valid tokens of each request: 1 plus the number of accepted drafts.
        last_ids: [S] int64, the last valid token of each request.
    """

    num_tokens: Tensor
    last_ids: Tensor


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The drafts of one step.

    Attributes:
        firsts_np, firsts: [S] int64, each request's first row; on the host and on the device.
        expected: [R] int64, device: the draft after each row, -1 for a request's last row.
    """

    firsts_np: Int64s
    firsts: Tensor
    expected: Tensor

    @classmethod
    def of(cls, num_drafts: Int64s, draft_ids: Int64s, buffers: InputBuffers) -> Self:
        """Make it from the [S] numbers of drafts and the draft ids, request after request."""
        num_rows = num_drafts + 1
        firsts = np.cumsum(num_rows) - num_rows
        expected = np.full(int(num_rows.sum()), _NO_DRAFT, dtype=np.int64)
        expected[np.arange(len(draft_ids)) + np.repeat(np.arange(len(num_drafts)), num_drafts)] = draft_ids
        firsts_on_device, expected_on_device = buffers.put_all([firsts, expected])
        return cls(firsts, firsts_on_device, expected_on_device)

    def check(self, token_ids: Tensor) -> Checked:
        """Compare the sampled tokens, [R] int64, with the drafts; does not wait for the device."""
        rows = torch.arange(len(token_ids), device=token_ids.device)
        # For each row: the first row, from this one on, that does not sample the next draft.
        ends = torch.where(token_ids == self.expected, len(token_ids), rows)
        ends = ends.flip(0).cummin(0).values.flip(0).index_select(0, self.firsts)
        return Checked(ends - self.firsts + 1, token_ids.index_select(0, ends))

    def runs(self, token_ids: Int32s, num_tokens: Int64s) -> Int32s:
        """The valid tokens of the [R] sampled ones, request after request; on the host."""
        return token_ids[self._rows(num_tokens)]

    def all_true(self, finite: npt.NDArray[np.bool_], num_tokens: Int64s) -> npt.NDArray[np.bool_]:
        """[S] whether the [R] flags are true for all valid tokens of a request; on the host."""
        result: npt.NDArray[np.bool_] = np.logical_and.reduceat(
            finite[self._rows(num_tokens)], np.cumsum(num_tokens) - num_tokens
        )
        return result

    def _rows(self, num_tokens: Int64s) -> Int64s:
        """Indices of the rows with valid tokens."""
        starts = np.cumsum(num_tokens) - num_tokens
        rows: Int64s = np.repeat(self.firsts_np - starts, num_tokens) + np.arange(int(num_tokens.sum()))
        return rows
