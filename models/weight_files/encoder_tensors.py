"""The names of an encoder's modules in Hugging Face's checkpoints, by family: for loading, and for the check before it.

The tensors of a checkpoint have the family's prefix ("bert.embeddings…") if a head was saved with the encoder, and
none if the encoder was saved alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from .needed_tensors import Module

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec


class EncoderNames(NamedTuple):
    """Modules of one family; those of a layer come after the layer's own name.

    Attributes:
        prefix: of all names, if the checkpoint has a head.
        layer: of a layer, with its number to be filled in.
        qkv: the three projections, or one for all.
        final_norm: only where norms come before the blocks.
    """

    prefix: str
    words: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    attention_out: str
    attention_norm: str
    mlp_in: str
    mlp_out: str
    mlp_norm: str
    final_norm: str = ""
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"

    def layer_name(self, layer_id: int) -> str:
        """The name of a layer, to which the names of its modules are appended."""
        return self.layer.format(layer_id)


_BERT: Final = EncoderNames(
    prefix="bert.",
    words="embeddings.word_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp_in="intermediate.dense",
    mlp_out="output.dense",
    mlp_norm="output.LayerNorm",
)

NAMES: Final[dict[str, EncoderNames]] = {
    "bert": _BERT,
    "roberta": _BERT._replace(prefix="roberta."),
    "xlm-roberta": _BERT._replace(prefix="roberta."),
    "distilbert": EncoderNames(
        prefix="distilbert.",
        words="embeddings.word_embeddings",
        embedding_norm="embeddings.LayerNorm",
        layer="transformer.layer.{}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        attention_out="attention.out_lin",
        attention_norm="sa_layer_norm",
        mlp_in="ffn.lin1",
        mlp_out="ffn.lin2",
        mlp_norm="output_layer_norm",
    ),
    "modernbert": EncoderNames(
        prefix="model.",
        words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layer="layers.{}.",
        qkv=("attn.Wqkv",),
        attention_out="attn.Wo",
        attention_norm="attn_norm",
        mlp_in="mlp.Wi",
        mlp_out="mlp.Wo",
        mlp_norm="mlp_norm",
        final_norm="final_norm",
    ),
}
"""By `model_type`."""

_NOT_OF_ENCODER: Final = (
    "classifier.",
    "cls.",
    "decoder.",
    "head.",
    "lm_head.",
    "pooler.",
    "pre_classifier.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "vocab_transform.",
)
_BUFFERS: Final = ("embeddings.position_ids", "embeddings.token_type_ids")


def prefix_of(names: EncoderNames, exists: Callable[[str], bool]) -> str:
    """The prefix of a checkpoint's tensors; `exists`: whether it has a tensor of this name."""
    return names.prefix if exists(f"{names.prefix}{names.words}.weight") else ""


def is_beside_encoder(name: str, prefix: str) -> bool:
    """Whether a tensor belongs to a head or is a buffer, so that the encoder does not need it."""
    own = name.removeprefix(prefix)
    return own in _BUFFERS or own.startswith(_NOT_OF_ENCODER)


def encoder_modules(spec: ModelSpec, prefix: str) -> Iterator[Module]:
    """All modules of an encoder; see `needed_modules`."""
    encoder, names, size = spec.encoder, NAMES[spec.model_type], spec.hidden_size
    assert encoder is not None
    tables = {
        names.words: spec.vocab_size,
        names.positions: encoder.position_rows,
        names.types: encoder.token_types,
    }
    for name, rows in tables.items():
        if rows:
            yield Module(prefix + name, (rows, size))
    norms = [names.embedding_norm] + ([names.final_norm] if names.final_norm else [])
    for layer_id in range(spec.num_layers):
        layer = names.layer_name(layer_id)
        if encoder.post_norm or layer_id:
            norms.append(layer + names.attention_norm)
        norms.append(layer + names.mlp_norm)
        for module in _linears(spec, names, gated=encoder.gated_mlp):
            yield module._replace(name=prefix + layer + module.name)
    for name in norms:
        yield Module(prefix + name, (size,), has_bias=encoder.norm_bias)


def _linears(spec: ModelSpec, names: EncoderNames, *, gated: bool) -> Iterator[Module]:
    size, inner = spec.hidden_size, spec.intermediate_size
    for name in names.qkv:
        yield Module(name, (3 * size // len(names.qkv), size), is_linear=True, has_bias=spec.biases.qkv)
    yield Module(names.attention_out, (size, size), is_linear=True, has_bias=spec.biases.attention_out)
    yield Module(names.mlp_in, (inner * (2 if gated else 1), size), is_linear=True, has_bias=spec.biases.mlp)
    yield Module(names.mlp_out, (size, inner), is_linear=True, has_bias=spec.biases.mlp)
