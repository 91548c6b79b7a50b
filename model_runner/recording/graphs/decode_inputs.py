"""`DecodeInputMemory`: the inputs of a recorded step in fixed device memory, uploaded with one copy.

Recorded decodes have a token of each request; recorded prompts have several, and do not read `seq_lens`.

    host    staging 0   [rows | positions | ... ]   written for step N while step N-1 may still be read from staging 1
                 │  one copy per step
    device  memory      [rows | positions | ... ]   the same layout for each batch size, from the same first byte

The device memory exists once: the copy of step N waits in the stream for step N-1. The host memory exists twice,
because the host does not wait: it writes the inputs of a step before the copy of the previous step may have begun.
"""

# Shapes: n rows of a recorded step (requests, or tokens), padding included; B of them real.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...adapter_runs import most_runs, write_plan
from ...memory.io_buffers import layout, views
from ...states.state_runs import write_padded_plan

if TYPE_CHECKING:
    from ..graph_device import GraphDevice


class HostBuffer:
    """See the module.

    Attributes:
        memory: [bytes] uint8.
    """

    def __init__(self, device: GraphDevice, num_bytes: int) -> None:
        self.memory = device.staging(num_bytes)
        self._device = device
        self._wait: Callable[[], None] = lambda: None

    def wait_until_read(self) -> None:
        """Wait for the last upload. With two buffers it has ended, unless more than two steps are in flight."""
        self._wait()

    def upload(self, target: Tensor) -> None:
        """Queue a copy of as many of the first bytes as `target` has, to it."""
        staged = self.memory[: target.nbytes].view(target.dtype).view(target.shape)
        self._wait = self._device.upload(target, staged)


Int64s = npt.NDArray[np.int64]
_Column = TypeVar("_Column")

_DTYPES: Final[tuple[type[np.generic], ...]] = (*(np.int64,) * 5, *(np.int32,) * 2)


class DecodeInputs(NamedTuple, Generic[_Column]):
    """The inputs that differ between recorded steps, [n] each; device tensors or host arrays.

    Attributes:
        rows: int64, pool rows; the dummy row for padding.
        positions: int64, position of the new token, by which heads turn.
        out_cache_loc: int64, slot of the new token; a slot of the dummy page for padding.
        known_ids: int64, the input token, or `RELAYED` (`input_batch`).
        table_indices: int64, index of the new token in the flat slot table.
        slots: int32, `out_cache_loc` in the table's dtype.
        seq_lens: int32, tokens of the request, including the new one.
        adapter_plan: [1 + 3 * `most_runs`] int64, see `AdapterRuns`; empty in a server without adapters.
        state_plan: [1 + 8 * n] int64, see `StateRuns`; empty for a model without state layers.
    """

    rows: _Column
    positions: _Column
    out_cache_loc: _Column
    known_ids: _Column
    table_indices: _Column
    slots: _Column
    seq_lens: _Column
    adapter_plan: _Column
    state_plan: _Column


class _Staging(HostBuffer):
    """A host buffer, and the inputs of each size in it."""

    def __init__(
        self,
        device: GraphDevice,
        num_bytes: int,
        sizes: Sequence[int],
        *,
        adapter_rows: int,
        has_states: bool,
    ) -> None:
        super().__init__(device, num_bytes)
        self.inputs: dict[int, DecodeInputs[npt.NDArray[Any]]] = {
            size: DecodeInputs(
                *(view.numpy() for view in _views(self.memory, size, adapter_rows, has_states))
            )
            for size in sizes
        }


class DecodeInputMemory:
    """The input memory of all batch sizes.

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
        has_adapters: bool = False,
        has_states: bool = False,
    ) -> None:
        """Allocate the memory.

        Args:
            dummy_row: the row for padding; its slots are in the dummy page.
            table_width: positions per row of the slot table.
            has_adapters: steps may have adapters.
            has_states: the model has state layers.
        """
        self._has_states = has_states
        self._dummy_row = dummy_row
        self._table_width = table_width
        adapter_rows = dummy_row + 1 if has_adapters else 0
        self._num_bytes = {size: layout(_templates(size, adapter_rows, has_states))[1] for size in sizes}
        most_bytes = max(self._num_bytes.values())
        self._memory = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
        self._staging = cycle(
            [
                _Staging(graph_device, most_bytes, sizes, adapter_rows=adapter_rows, has_states=has_states)
                for _ in range(2)
            ]
        )
        self.on_device: dict[int, DecodeInputs[Tensor]] = {
            size: DecodeInputs(*_views(self._memory, size, adapter_rows, has_states)) for size in sizes
        }

    def upload(
        self,
        size: int,
        rows: Int64s,
        positions: Int64s,
        out_cache_loc: Int64s,
        known_ids: Int64s,
        adapter_slots: Int64s | None = None,
        state_plan: Int64s | None = None,
        rope_positions: Int64s | None = None,
    ) -> DecodeInputs[Tensor]:
        """Queue the upload of a step's inputs, [B] each; returns the device tensors, padded to `size`.

        Args:
            adapter_slots: see `InputBatch`; padding uses the base model.
            state_plan: see `InputBatch`; None: there is only padding, or the model has no state layers.
            rope_positions: see `InputBatch`.
        """
        staging = next(self._staging)
        staging.wait_until_read()
        host, num = staging.inputs[size], len(rows)
        for column, values, padding in (
            (host.rows, rows, self._dummy_row),
            (host.positions, positions if rope_positions is None else rope_positions, 0),
            (host.out_cache_loc, out_cache_loc, 0),
            (host.known_ids, known_ids, 0),
            (host.table_indices, rows * self._table_width + positions, self._dummy_row * self._table_width),
            (host.slots, out_cache_loc, 0),
            (host.seq_lens, positions + 1, 1),
        ):
            column[:num] = values
            column[num:] = padding
        if adapter_slots is not None:
            padded = np.zeros(size, dtype=np.int64)
            padded[:num] = adapter_slots
            write_plan(host.adapter_plan, padded)
        if self._has_states:
            plan = np.zeros(1, dtype=np.int64) if state_plan is None else state_plan
            write_padded_plan(host.state_plan, plan, num, size, self._dummy_row)
        staging.upload(self._memory[: self._num_bytes[size]])
        return self.on_device[size]

    def upload_padding(self, size: int, *, has_adapters: bool = False) -> DecodeInputs[Tensor]:
        """The same for a step with padding only."""
        nothing = np.empty(0, dtype=np.int64)
        return self.upload(
            size, nothing, nothing, nothing, nothing, adapter_slots=nothing if has_adapters else None
        )


def _templates(size: int, adapter_rows: int, has_states: bool) -> list[npt.NDArray[Any]]:
    """Arrays with the dtypes and shapes of `DecodeInputs`; their values are not read.

    Args:
        adapter_rows: pool rows that may use adapters, with the dummy row; 0: steps have no adapters.
    """
    plan = np.empty(1 + 3 * most_runs(size, adapter_rows) if adapter_rows else 0, dtype=np.int64)
    states = np.empty(1 + 8 * size if has_states else 0, dtype=np.int64)  # see `recorded_state_plan`
    return [*(np.empty(size, dtype=dtype) for dtype in _DTYPES), plan, states]


def _views(memory: Tensor, size: int, adapter_rows: int, has_states: bool) -> list[Tensor]:
    templates = _templates(size, adapter_rows, has_states)
    starts, num_bytes = layout(templates)
    return views(memory[:num_bytes], templates, starts)
