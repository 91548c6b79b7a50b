"""`StreamsSpec`: the parts of Gemma 3n and Gemma 4 that no other decoder has.

Layers of different sizes, layers that attend to keys and values of others, inputs of layers, further residual streams.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .layer_form import LayerHeads

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


class StreamsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The residual stream of Gemma 3n and Gemma 4; other decoders have the default, in which layers are alike.

    Attributes:
        layer_heads: one for each layer, where layers differ; see `ModelSpec.heads_of`.
        intermediate_sizes: one for each layer, where layers differ; see `ModelSpec.inner_size_of`.
        kv_sources: the layer whose keys and values each layer attends to; empty: its own.
        layer_inputs: None: layers have no inputs of their own.
        altup: None: there is one residual stream.
        sparsity: of the gates of each layer, see `GatedActivation`; empty: all gates are used.
    """

    layer_heads: tuple[LayerHeads, ...] = ()
    intermediate_sizes: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    layer_inputs: LayerInputsSpec | None = None
    altup: AltUpSpec | None = None
    sparsity: tuple[float, ...] = ()

    @property
    def num_further(self) -> int:
        """Residual streams beside the first one."""
        return 0 if self.altup is None else self.altup.num_streams - 1

    def of_rank(self, tp: int) -> StreamsSpec:
        """The part of each of `tp` ranks."""
        inputs = self.layer_inputs
        if inputs is not None:
            inputs = msgspec.structs.replace(inputs, vocab_size=-(-inputs.vocab_size // tp))
        return msgspec.structs.replace(
            self,
            layer_heads=tuple(
                msgspec.structs.replace(
                    heads, num_kv_heads=max(1, heads.num_kv_heads // tp), num_heads=heads.num_heads // tp
                )
                for heads in self.layer_heads
            ),
            intermediate_sizes=tuple(size // tp for size in self.intermediate_sizes),
            layer_inputs=inputs,
        )


ONE_STREAM: Final = StreamsSpec()
"""One residual stream through layers of one size."""
