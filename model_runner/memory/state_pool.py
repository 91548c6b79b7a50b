"""`StatePool`: the tensors with the states of all requests; see `state_runs` for the numbering of its slots."""

# Shapes: S slots, L taps of the convolution, K channels on this rank.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..states.state_runs import ZERO_SLOT, StateLayout, StateRuns
from .host_memory import reserve

if TYPE_CHECKING:
    from ...runtime.model_files.state_spec import StateSpec


class StatePool:
    """The memory of state layers.

    Attributes:
        conv: for each state layer [S, L - 1, K] in the dtype of the model: the last inputs of its convolution, the
            oldest first.
        layout: of the slots.
        num_bytes: memory reserved; on the CPU only slots that were used are resident.
    """

    def __init__(
        self,
        state: StateSpec,
        *,
        layout: StateLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve the memory. `state`: of this rank."""
        self.layout = layout
        shape = (layout.num_slots, *state.conv_shape)
        self.conv: list[Tensor] = []
        for _ in range(state.num_layers):
            slots = (
                reserve(shape, dtype)
                if device.type == "cpu"
                else torch.zeros(shape, dtype=dtype, device=device)
            )
            slots[ZERO_SLOT].zero_()
            self.conv.append(slots)
        state_layers = [layer_id for layer_id, keeps_state in enumerate(state.layers) if keeps_state]
        self._index_of = {layer_id: index for index, layer_id in enumerate(state_layers)}
        self.num_bytes = sum(slots.nbytes for slots in self.conv)

    def layer(self, layer_id: int) -> Tensor:
        """The slots of one state layer; `layer_id` counts all layers of the model."""
        return self.conv[self._index_of[layer_id]]


class StateBatch(NamedTuple):
    """The states of a step: all slots, and the runs of its tokens."""

    pool: StatePool
    runs: StateRuns
