"""`StatePool`: the tensors with the states of all requests; see `state_runs` for the numbering of its slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..states.state_runs import ZERO_SLOT, LayerStates, StateLayout, StateRuns
from .host_memory import reserve

if TYPE_CHECKING:
    from ...models.spec.state_spec import StateSpec


class StatePool:
    """The memory of state layers.

    Attributes:
        layers: the slots of each state layer, in the order of layers.
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

        def reserved(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            whole = (layout.num_slots, *shape)
            if device.type != "cpu":
                return torch.zeros(whole, dtype=dtype, device=device)
            slots = reserve(whole, dtype)
            slots[ZERO_SLOT].zero_()
            return slots

        recurrent = state.recurrent
        self.layers = [
            LayerStates(
                reserved(state.conv_shape, dtype),
                None if recurrent is None else reserved(recurrent.shape, getattr(torch, recurrent.dtype)),
            )
            for _ in range(state.num_layers)
        ]
        state_layers = [layer_id for layer_id, keeps_state in enumerate(state.layers) if keeps_state]
        self._index_of = {layer_id: index for index, layer_id in enumerate(state_layers)}
        self.num_bytes = sum(part.nbytes for layer in self.layers for part in layer if part is not None)

    @property
    def checkpoint_views(self) -> list[Tensor]:
        """[1 + C, ...] each: all parts of the checkpoints 1..C; 0 is the slot of padding."""
        first, last = self.layout.of_checkpoint(0), self.layout.of_checkpoint(self.layout.num_checkpoints)
        return [part[first : last + 1] for layer in self.layers for part in layer if part is not None]

    def layer(self, layer_id: int) -> LayerStates:
        """The slots of one state layer; `layer_id` counts all layers of the model."""
        return self.layers[self._index_of[layer_id]]


class StateBatch(NamedTuple):
    """The states of a step: all slots, and the runs of its tokens."""

    pool: StatePool
    runs: StateRuns
