"""ModernBERT (Warner et al. 2024).

Differences to BERT: norms come before the blocks, and the first block has none because the embeddings have one; rotary
positions; a gated MLP. Most layers have a window around each token, and another rotary base; both are in the
`ModelSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder import LayerRotary
from ..layers.encoder import Encoder, EncoderParts

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward_batch import ForwardBatch
    from ..layers.encoder import Angles
    from ..layers.layer import SelectRows
    from ..model_context import ModelContext


def build(context: ModelContext) -> Encoder:
    """Build the encoder."""
    parts, spec = EncoderParts(context), context.spec
    words, norm = parts.table(parts.names.words, spec.vocab_size), parts.norm(parts.names.embedding_norm)
    take_rows = context.ops.take_rows
    layers = [PreNormLayer(parts, layer_id) for layer_id in range(spec.num_layers)]
    return Encoder(
        context,
        lambda batch: norm(take_rows(words, batch.input_ids)),
        LayerRotary(context).at,
        layers,
        parts.norm(parts.names.final_norm),
    )


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the first layer's attention has no norm."""

    def __init__(self, parts: EncoderParts, layer_id: int) -> None:
        layer = parts.names.layer_name(layer_id)
        self.attention_norm = parts.norm(layer + parts.names.attention_norm) if layer_id else None
        self.attention = parts.attention(layer_id)
        self.mlp_norm = parts.norm(layer + parts.names.mlp_norm)
        self.mlp = parts.mlp(layer_id)

    def __call__(
        self, x: Tensor | None, residual: Tensor, angles: Angles, batch: ForwardBatch, select_rows: SelectRows
    ) -> tuple[Tensor | None, Tensor]:
        if self.attention_norm is None:
            assert x is None
            normed = residual
        else:
            assert x is not None
            normed, residual = self.attention_norm.add(x, residual)
        attended = self.attention(normed, angles, batch, select_rows)
        normed, residual = self.mlp_norm.add(attended, select_rows(residual))
        return self.mlp(normed), residual
