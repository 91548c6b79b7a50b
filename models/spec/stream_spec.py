"""What some decoders add to their residual stream beside attention and MLPs: inputs of layers, and further streams."""

from __future__ import annotations

from typing import Final

import msgspec

LAYER_TABLE: Final = "model.embed_tokens_per_layer"
"""The module with the embeddings of tokens for layers, see `LayerInputsSpec`."""


class LayerInputsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Each token has an embedding for each layer, which the layer adds through a gate (Gemma 3n, Gemma 4).

    Attributes:
        size: of the embedding of one layer.
        vocab_size: rows of the table, which has the embeddings of all layers side by side; tokens beyond it have the
            row 0.
    """

    size: int
    vocab_size: int


class AltUpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several residual streams, of which each layer computes one and predicts the others (Baykal et al. 2023).

    Attributes:
        num_streams: streams of each token.
        active: the stream that layers compute.
        scales_output: a learned factor of each number of the active stream, before the gate of the layer's input.
        laurel_rank: size between the two matrices of the learned residual beside attention.
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int
