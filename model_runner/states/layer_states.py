"""`LayerStates`: the slots of one state layer."""

# Shapes: S slots, L taps of the convolution, K channels on this rank; [H, ...] of a state: see `RecurrentState`.

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerStates(NamedTuple):
    """The slots of one state layer; see `state_runs` for their numbering.

    Attributes:
        conv: [S, L - 1, K] in the dtype of the model: the last inputs of its convolution, the oldest first.
        recurrent: [S, H, ...] in a dtype of its own; None: the layer keeps nothing beside them.
    """

    conv: Tensor
    recurrent: Tensor | None = None
