"""`QueryFactors`: factors of the rotated queries by position, which keep the scores of long contexts sharp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ...model_context import ModelContext


class QueryFactors:
    """1 + beta * log(1 + floor(position / original_max_position)), as in Ministral 3."""

    @classmethod
    def of(cls, context: ModelContext) -> QueryFactors | None:
        """Those of the model; None: it has none."""
        scaling = context.spec.rope_scaling
        return cls(context, scaling.query_beta, scaling.original_max_position) if scaling.query_beta else None

    def __init__(self, context: ModelContext, beta: float, original_max_position: int) -> None:
        """Compute the factors of all positions."""
        positions = torch.arange(context.max_model_len, dtype=torch.float32)
        factors = 1 + beta * torch.log1p((positions / original_max_position).floor())
        self._table = factors.unsqueeze(1).to(context.device)
        self._take_rows = context.ops.take_rows

    def at(self, positions: Tensor) -> Tensor:
        """[T] int64 -> [T, 1] float32."""
        return self._take_rows(self._table, positions)
