"""Layers of other structures than Llama's: norms after the blocks or on both sides of them, or blocks in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .row_selection import kept_adapters

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward_batch import ForwardBatch
    from ..ops.elementwise import AddOp
    from .decoder import MLP, Attention
    from .norm import Norm
    from .row_selection import SelectRows


class PostNormLayer:
    """Attention and MLP, each followed by a norm, then added to the residual stream."""

    def __init__(
        self, attention: Attention, attention_norm: Norm, mlp: MLP, mlp_norm: Norm, add: AddOp
    ) -> None:
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm
        self._add = add

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor, Tensor]:
        if x is not None:
            residual = self._add(x, residual)
        x = self.attention_norm(self.attention(residual, cos, sin, batch, select_rows))
        residual = self._add(x, select_rows(residual))
        return self.mlp_norm(self.mlp(residual, kept_adapters(batch, select_rows))), residual


class SandwichLayer:
    """Attention and MLP, each between two norms."""

    def __init__(
        self,
        attention_norm: Norm,
        attention: Attention,
        after_attention_norm: Norm,
        mlp_norm: Norm,
        mlp: MLP,
        after_mlp_norm: Norm,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.after_attention_norm = after_attention_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.after_mlp_norm = after_mlp_norm

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor, Tensor]:
        if x is None:
            x = self.attention_norm(residual)
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.after_attention_norm(self.attention(x, cos, sin, batch, select_rows))
        x, residual = self.mlp_norm.add(x, select_rows(residual))
        return self.after_mlp_norm(self.mlp(x, kept_adapters(batch, select_rows))), residual


class ParallelLayer:
    """Attention and MLP of the same normalized input; their sum is added to the residual stream."""

    def __init__(self, norm: Norm, attention: Attention, mlp: MLP, add: AddOp) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp = mlp
        self._add = add

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor, Tensor]:
        if x is None:
            x = self.norm(residual)
        else:
            x, residual = self.norm.add(x, residual)
        attended = self.attention(x, cos, sin, batch, select_rows)
        widened = self.mlp(select_rows(x), kept_adapters(batch, select_rows))
        return self._add(attended, widened), select_rows(residual)
