"""`DecodeInputMemory`: the numbers of a recorded decode step in fixed device memory, and the one copy that brings them.

    host    staging 0   [rows | positions | ... ]   written for step N while step N-1 may still be read from staging 1
                 │  one copy per step
    device  memory      [rows | positions | ... ]   the same layout for each batch size, from the same first byte

The device's memory exists once: the copy of step N waits in the stream for the step before. The host's exists twice,
because the host does not wait: it writes the numbers of a step while the copy of the one before may not have begun.
"""

# Shapes: n requests of a recorded step, padding included; B of them real.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..memory.io_buffers import layout, views

if TYPE_CHECKING:
    from .graph_device import GraphDevice

Int64s = npt.NDArray[np.int64]
_Column = TypeVar("_Column")

_DTYPES: Final[tuple[type[np.generic], ...]] = (*(np.int64,) * 5, *(np.int32,) * 2)


class DecodeInputs(NamedTuple, Generic[_Column]):
    """[n] each, of a decode step: all that one step has and another has not. Tensors, or arrays of the host.

    Attributes:
        rows: int64, pool rows; the dummy row for padding.
        positions: int64, of the new token.
        out_cache_loc: int64, the slot of the new token; one of the dummy page for padding.
        known_ids: int64, the input token, or `RELAYED` (`input_batch`).
        table_indices: int64, where in the flat slot table the new token's slot stands.
        slots: int32, `out_cache_loc` in the table's dtype.
        seq_lens: int32, tokens of the request, the new one included.
    """

    rows: _Column
    positions: _Column
    out_cache_loc: _Column
    known_ids: _Column
    table_indices: _Column
    slots: _Column
    seq_lens: _Column


class _Staging:
    """One of the host's two buffers."""

    def __init__(self, memory: Tensor, sizes: Sequence[int]) -> None:
        self.memory = memory
        self.inputs: dict[int, DecodeInputs[npt.NDArray[Any]]] = {
            size: DecodeInputs(*(view.numpy() for view in _views(memory, size))) for size in sizes
        }
        self.wait_until_read: Callable[[], None] = lambda: None


class DecodeInputMemory:
    """The memory of all batch sizes.

    Attributes:
        on_device: batch size -> tensors over the device's memory.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        dummy_row: int,
        table_width: int,
        device: torch.device,
        graph_device: GraphDevice,
    ) -> None:
        """`table_width`: positions of a row of the slot table, in which row `dummy_row` has slots of the dummy page."""
        self._dummy_row = dummy_row
        self._table_width = table_width
        self._graph_device = graph_device
        self._num_bytes = {size: layout(_templates(size))[1] for size in sizes}
        most_bytes = max(self._num_bytes.values())
        self._memory = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
        self._staging = [_Staging(graph_device.staging(most_bytes), sizes) for _ in range(2)]
        self.on_device: dict[int, DecodeInputs[Tensor]] = {
            size: DecodeInputs(*_views(self._memory, size)) for size in sizes
        }

    def upload(
        self, size: int, rows: Int64s, positions: Int64s, out_cache_loc: Int64s, known_ids: Int64s
    ) -> DecodeInputs[Tensor]:
        """Queue the copy of a step's numbers, [B] each; what comes back has them, and padding up to `size`."""
        staging = self._staging.pop(0)
        self._staging.append(staging)
        staging.wait_until_read()  # of two steps ago: done long since, unless somebody launches more ahead
        host, num = staging.inputs[size], len(rows)
        for column, values, padding in (
            (host.rows, rows, self._dummy_row),
            (host.positions, positions, 0),
            (host.out_cache_loc, out_cache_loc, 0),
            (host.known_ids, known_ids, 0),
            (host.table_indices, rows * self._table_width + positions, self._dummy_row * self._table_width),
            (host.slots, out_cache_loc, 0),
            (host.seq_lens, positions + 1, 1),
        ):
            column[:num] = values
            column[num:] = padding
        num_bytes = self._num_bytes[size]
        staging.wait_until_read = self._graph_device.upload(
            self._memory[:num_bytes], staging.memory[:num_bytes]
        )
        return self.on_device[size]

    def upload_padding(self, size: int) -> DecodeInputs[Tensor]:
        """The same for a step of nobody."""
        nothing = np.empty(0, dtype=np.int64)
        return self.upload(size, nothing, nothing, nothing, nothing)


def _templates(size: int) -> list[npt.NDArray[Any]]:
    """Arrays as those of `DecodeInputs`; their numbers are never looked at."""
    return [np.empty(size, dtype=dtype) for dtype in _DTYPES]


def _views(memory: Tensor, size: int) -> list[Tensor]:
    templates = _templates(size)
    starts, num_bytes = layout(templates)
    return views(memory[:num_bytes], templates, starts)
