"""`Layer`: the blocks of a decoder layer around the residual stream; and which tokens are computed after attention."""

# Shapes: T new tokens in the batch, W of them need logits (see `ForwardBatch`), R rotated dimensions of a head.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch
    from ..ops.elementwise import AddOp, TakeRows
    from .norm import Norm

SelectRows = Callable[["Tensor"], "Tensor"]
"""Selects the rows of the tokens that are computed further from the rows of all tokens."""


def all_rows(x: Tensor) -> Tensor:
    """The `SelectRows` of all layers except the last: every row."""
    return x


def rows_with_logits(batch: ForwardBatch, take_rows: TakeRows) -> SelectRows:
    """The `SelectRows` of the last layer: the tokens that need logits."""
    wanted = batch.logits_indices
    return all_rows if wanted is None else lambda x: take_rows(x.contiguous(), wanted)


def kept_adapters(batch: ForwardBatch, select_rows: SelectRows) -> AdapterRuns | None:
    """The adapters of the rows that `select_rows` selects; None: all use the base model."""
    if batch.adapters is None:
        return None
    return batch.adapters.tokens if select_rows is all_rows else batch.adapters.kept


class Attention(Protocol):
    """The block of a layer that mixes tokens: attention, or what is in its place."""

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        """[T, hidden] -> [W, hidden]."""
        ...


class MLP(Protocol):
    """The feed-forward block of a layer."""

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, size] -> [T, size]; `adapters`: see `Linear`."""
        ...


@dataclass(slots=True, eq=False)
class Layer:
    """Attention and MLP, or one of them, each between two norms of which any may be missing.

    x = after_norm(block(norm(residual))) is added to the residual stream by the next block, fused with its norm.
    """

    add: AddOp
    attention_norm: Norm | None = None
    attention: Attention | None = None
    after_attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp: MLP | None = None
    after_mlp_norm: Norm | None = None

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor, Tensor]:
        """Output of the previous block -> output of this one; neither is added to the residual stream yet.

        Args:
            x: [T, hidden] output of the previous layer; None in the first layer.
            residual: [T, hidden].
            cos, sin: [T, R], the rotary angles of this kind of layer.
            select_rows: applied to the attention output and to the residual stream right after attention, where the
                other tokens are not read any more.
        """
        if self.attention is not None:
            x, residual = self.entered(self.attention_norm, x, residual)
            x = self.attention(x, cos, sin, batch, select_rows)
            if self.after_attention_norm is not None:
                x = self.after_attention_norm(x)
        elif x is not None:
            x = select_rows(x)
        residual = select_rows(residual)
        if self.mlp is not None:
            x, residual = self.entered(self.mlp_norm, x, residual)
            x = self.mlp(x, kept_adapters(batch, select_rows))
            if self.after_mlp_norm is not None:
                x = self.after_mlp_norm(x)
        assert x is not None, "a layer has a block"
        return x, residual

    def entered(self, norm: Norm | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The input of a block, and the residual stream with what the block before returned."""
        if x is not None and norm is not None:
            return norm.add(x, residual)
        if x is not None:
            residual = self.add(x, residual)
        return residual if norm is None else norm(residual), residual


@dataclass(slots=True, eq=False)
class ParallelBlocks:
    """Attention and MLP of the same normalized input; an `Attention` that returns their sum."""

    attention: Attention
    mlp: MLP
    add: AddOp

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        attended = self.attention(x, cos, sin, batch, select_rows)
        return self.add(attended, self.mlp(select_rows(x), kept_adapters(batch, select_rows)))
