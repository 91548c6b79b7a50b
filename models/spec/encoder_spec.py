"""`EncoderSpec`: what an encoder has besides the facts of `ModelSpec`, which names this record for encoders only.

An encoder computes a hidden state for each token of a text, and each token attends to all tokens of its text, before
and after it. A text is therefore computed whole, in one step, and generates nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""`gelu` is the exact one, by the error function."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        post_norm: a norm after each block and its residual addition (BERT); else before each block, and a final one
            (ModernBERT).
        activation: of the MLP.
        gated_mlp: the MLP is down(act(gate(x)) * up(x)), else down(act(up(x))).
        norm_bias: norms have a bias.
        position_rows: rows of the table of learned positions; 0: rotary positions.
        position_offset: the row of a text's first token (RoBERTa: 2).
        token_types: rows of the table of token types; 0: none. With at least 2 the second text of a pair has type 1.
    """

    post_norm: bool
    activation: EncoderActivation
    gated_mlp: bool = False
    norm_bias: bool = True
    position_rows: int = 0
    position_offset: int = 0
    token_types: int = 0

    @property
    def positions(self) -> int:
        """Tokens of the longest text that the table of positions allows; 0: there is no table."""
        return self.position_rows - self.position_offset

    def num_parameters(
        self, *, vocab_size: int, size: int, inner: int, num_layers: int, biases: tuple[bool, bool, bool]
    ) -> int:
        """Weights of the encoder.

        Args:
            size, inner: hidden size, and width of the MLP.
            biases: whether q, k and v, the attention output, and the MLP have biases.
        """
        qkv, out, mlp = biases
        wide = 2 * inner if self.gated_mlp else inner
        layer = 4 * size * size + size * wide + inner * size
        layer += 3 * size * qkv + size * out + (wide + size) * mlp
        # Pre-norm: the first layer's attention has none, and there is a final one instead.
        num_norms = 1 + 2 * num_layers
        norms = num_norms * size * (2 if self.norm_bias else 1)
        return num_layers * layer + norms + (vocab_size + self.position_rows + self.token_types) * size
