"""BERT (Devlin et al. 2018) and encoders of the same shape: RoBERTa, XLM-RoBERTa, DistilBERT.

Learned positions; a norm after each block and its residual addition. The facts that differ are in the `EncoderSpec`,
and the names of tensors in `encoder_tensors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.encoder import Encoder, EncoderParts, LearnedPositions, no_angles

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward_batch import ForwardBatch
    from ..layers.layer import SelectRows
    from ..model_context import ModelContext


def build(context: ModelContext) -> Encoder:
    """Build the encoder."""
    parts = EncoderParts(context)
    sum_of_tables, norm = LearnedPositions(parts), parts.norm(parts.names.embedding_norm)
    num_layers = context.spec.num_layers
    layers = [PostNormLayer(parts, layer_id) for layer_id in range(num_layers)]
    return Encoder(
        context, lambda batch: norm(sum_of_tables(batch)), no_angles(num_layers, context), layers, None
    )


class PostNormLayer:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, parts: EncoderParts, layer_id: int) -> None:
        layer = parts.names.layer_name(layer_id)
        self.attention = parts.attention(layer_id)
        self.attention_norm = parts.norm(layer + parts.names.attention_norm)
        self.mlp = parts.mlp(layer_id)
        self.mlp_norm = parts.norm(layer + parts.names.mlp_norm)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor | None, Tensor]:
        """Nothing is left to add."""
        assert x is None
        attended = self.attention(residual, cos, sin, batch, select_rows)
        residual, _ = self.attention_norm.add(attended, select_rows(residual))
        residual, _ = self.mlp_norm.add(self.mlp(residual), residual)
        return None, residual
