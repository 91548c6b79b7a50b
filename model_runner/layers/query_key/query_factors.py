"""`QueryFactors`: factors of the queries by position, see `TemperatureTuning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ....models.spec.layer_form import TemperatureTuning
    from ...model_context import ModelContext


class QueryFactors:
    """The factors of all positions."""

    @classmethod
    def of(cls, context: ModelContext) -> QueryFactors | None:
        """Make the factors of the model; None: it has none."""
        tuning = context.spec.attention.temperature
        return None if tuning is None else cls(context, tuning)

    def __init__(self, context: ModelContext, tuning: TemperatureTuning) -> None:
        """Compute the factors."""
        positions = torch.arange(context.max_model_len, dtype=torch.float32)
        steps = ((positions + tuning.offset) / tuning.length).floor()
        factors = 1 + tuning.scale * torch.log1p(steps)
        self._table = factors.unsqueeze(1).to(context.device)
        self._take_rows = context.ops.take_rows
        self._unrotated_only = tuning.unrotated_only

    def for_layer(self, rotates: bool) -> QueryFactors | None:
        """These, or None for a layer of which the queries have none."""
        return None if rotates and self._unrotated_only else self

    def at(self, positions: Tensor) -> Tensor:
        """[T] int64 -> [T, 1] float32."""
        return self._take_rows(self._table, positions)
