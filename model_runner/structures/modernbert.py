"""ModernBERT (Warner et al. 2024).

Differences to BERT: norms come before the blocks, and the first block has none because the embeddings have one; rotary
positions; a gated MLP. Most layers have a window around each token, and another rotary base; both are in the
`ModelSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder import LayerRotary
from ..layers.encoder import Encoder, EncoderParts
from ..layers.layer import Layer

if TYPE_CHECKING:
    from ..model_context import ModelContext


def build(context: ModelContext) -> Encoder:
    """Build the encoder."""
    parts, spec = EncoderParts(context), context.spec
    words, norm = parts.table(parts.names.words, spec.vocab_size), parts.norm(parts.names.embedding_norm)
    take_rows = context.ops.take_rows
    layers = [_layer(parts, layer_id) for layer_id in range(spec.num_layers)]
    return Encoder(
        context,
        lambda batch: norm(take_rows(words, batch.input_ids)),
        LayerRotary(context).at,
        layers,
        parts.norm(parts.names.final_norm),
    )


def _layer(parts: EncoderParts, layer_id: int) -> Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the first layer's attention has no norm."""
    name, names = parts.names.layer_name(layer_id), parts.names
    return Layer(
        parts.context.ops.add,
        attention_norm=parts.norm(name + names.attention_norm) if layer_id else None,
        attention=parts.attention(layer_id),
        mlp_norm=parts.norm(name + names.mlp_norm),
        mlp=parts.mlp(layer_id),
    )
