"""`ModelContext`: the parts from which a model is built. The constructor of every layer takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..launch.resolve.stages import WHOLE_MODEL, Stage
from .distributed.tp_group import SINGLE_RANK

if TYPE_CHECKING:
    import torch

    from ..models.spec.model_spec import ModelSpec
    from .adapters.adapter_layers import AdapterLayers
    from .distributed.tp_group import TPGroup
    from .ops.ops import Ops
    from .weights.linear_format import LinearFormat
    from .weights.reader import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """The parts from which a model is built.

    Attributes:
        spec: spec of the whole model, or of a pipeline stage as `stage_spec` makes it.
        weights: reads its tensors by name.
        linear_format: how the weights of linear layers are stored.
        ops: the functions with which layers compute.
        max_model_len: number of positions that need rotary angles.
        device: the device of the tensors.
        group: the ranks that share the model; layers take this rank's part of their weights.
        adapters: collects the layers that adapters can change; None: the server has no adapters.
        stage: the pipeline stage that is built; its layers are those of `spec`.
    """

    spec: ModelSpec
    weights: WeightReader
    linear_format: LinearFormat
    ops: Ops
    max_model_len: int
    device: torch.device
    group: TPGroup = SINGLE_RANK
    adapters: AdapterLayers | None = None
    stage: Stage = WHOLE_MODEL

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.weights.dtype
