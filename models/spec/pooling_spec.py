"""`PoolingSpec`: how a model turns a text's hidden states into a vector or into scores.

Read from the model's folder (see `hf/sentence_transformers`), and part of `ModelSpec`; None there for a model that
generates text.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from ...runtime.config.model_choice import PoolingType

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
