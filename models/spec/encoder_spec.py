"""`EncoderSpec` and `PoolingSpec`: what models that return vectors or scores have besides the facts of `ModelSpec`.

An encoder computes a hidden state for each token of a text, and each token attends to all tokens of its text, before
and after it. A text is therefore computed whole, in one step, and generates nothing. Pooling turns the hidden states of
a text into one vector, or into scores.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from ...runtime.config.model_choice import PoolingType
from .layer_form import Biases

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
        self, *, vocab_size: int, size: int, inner: int, num_layers: int, biases: Biases
    ) -> int:
        """Weights of the encoder.

        Args:
            size, inner: hidden size, and width of the MLP.
        """
        wide = 2 * inner if self.gated_mlp else inner
        layer = 4 * size * size + size * wide + inner * size
        layer += 3 * size * biases.qkv + size * biases.attention_out + (wide + size) * biases.mlp
        # Pre-norm: the first layer's attention has none, and there is a final one instead.
        num_norms = 1 + 2 * num_layers
        norms = num_norms * size * (2 if self.norm_bias else 1)
        return num_layers * layer + norms + (vocab_size + self.position_rows + self.token_types) * size


Task = Literal["embed", "score"]
HeadActivation = Literal["identity", "tanh", "gelu", "relu"]
ScoreActivation = Literal["identity", "sigmoid", "softmax"]

MAX_DENSE_LAYERS: Final = 8


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer after pooling.

    Attributes:
        weight: name of its weight tensor, [out_features, in_features].
        folder: the folder of the tensor's safetensors file, relative to the model's; "" for the model's own files.
        bias: name of its bias tensor, [out_features]; "" for none.
        activation: applied to the output.
        norm: name of a LayerNorm weight applied after the activation; "" for none (ModernBERT's head).
    """

    weight: str
    in_features: int
    out_features: int
    folder: str = ""
    bias: str = ""
    activation: HeadActivation = "identity"
    norm: str = ""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        task: "embed": vectors of texts; "score": scores of texts, or of pairs of texts (rerankers, classifiers).
        pooling: see `PoolingType`.
        size: numbers of a result: the width of the vector, or the number of scores.
        dense: layers after pooling, in order; for scores the last one is the classifier.
        normalize: vectors have length 1. For embed.
        dimensions: shorter lengths at which the model was trained (Matryoshka), to which a client may cut vectors.
        any_dimensions: the model was trained for shorter vectors of any length.
        default_dimensions: length of the vectors of requests that ask for none; 0: `size`.
        prompts: text to put before an input, by its name ("query", "document"). For embed.
        default_prompt: the name of the prompt of inputs without one; "" for none.
        activation: turns the outputs of the classifier into scores.
        labels: names of the scores.
        label_tokens: a reranker without a head: the score is the probability of the first of these tokens as the next
            one, among all of them ("yes", "no").
        template: of such a reranker: the text of a pair, with {instruction}, {query} and {document}.
        instruction: of requests without one, for the template.
        reason: why these are the task and the pooling, for the log and for `engine doctor`.
    """

    task: Task
    pooling: PoolingType
    size: int
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False
    default_dimensions: int = 0
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    activation: ScoreActivation = "identity"
    labels: tuple[str, ...] = ()
    label_tokens: tuple[str, ...] = ()
    template: str = ""
    instruction: str = ""
    reason: str = ""
