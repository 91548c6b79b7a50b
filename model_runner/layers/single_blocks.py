"""Layers of a single block each, as in Nemotron-H: what mixes tokens, or an MLP, after a norm."""

# Shapes: see `Layer`.

from __future__ import annotations

from typing import TYPE_CHECKING

from .row_selection import kept_adapters

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward_batch import ForwardBatch
    from .decoder import MLP, Attention
    from .norm import Norm
    from .row_selection import SelectRows


class MixerLayer:
    """Attention, or what is in its place."""

    def __init__(self, norm: Norm, mixer: Attention) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor, Tensor]:
        x, residual = _normalized(self.norm, x, residual)
        return self.mixer(x, cos, sin, batch, select_rows), select_rows(residual)


class MLPLayer:
    """An MLP."""

    def __init__(self, norm: Norm, mlp: MLP) -> None:
        self.norm = norm
        self.mlp = mlp

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor, Tensor]:
        """Only the kept rows are computed."""
        x, residual = _normalized(self.norm, None if x is None else select_rows(x), select_rows(residual))
        return self.mlp(x, kept_adapters(batch, select_rows)), residual


def _normalized(norm: Norm, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The input of a block, and the residual stream with what the block before returned."""
    return (norm(residual), residual) if x is None else norm.add(x, residual)
