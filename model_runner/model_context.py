"""`ModelContext`: what a model is built from. Every layer's constructor takes it and picks what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .distributed.tp_group import SINGLE_RANK

if TYPE_CHECKING:
    import torch

    from ..runtime.model_files.model_spec import ModelSpec
    from .distributed.tp_group import TPGroup
    from .ops import Ops
    from .weights.linear_format import LinearFormat
    from .weights.reader import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """See the module.

    Attributes:
        spec: the whole model.
        weights: hands out its tensors by name.
        linear_format: how the weights of linear layers are stored.
        ops: who computes what.
        max_model_len: positions for which there must be rotary angles.
        device: where the tensors live.
        group: the ranks that share the model; layers take this rank's part of their weights.
    """

    spec: ModelSpec
    weights: WeightReader
    linear_format: LinearFormat
    ops: Ops
    max_model_len: int
    device: torch.device
    group: TPGroup = SINGLE_RANK

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.weights.dtype
