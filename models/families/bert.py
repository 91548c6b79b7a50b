"""BERT and encoders of the same shape: RoBERTa, XLM-RoBERTa, DistilBERT. Positions are learned."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.encoder_spec import EncoderActivation, EncoderSpec
from ..spec.layer_form import Biases
from .family import Facts, Family
from .hf_rope import MAX_POSITIONS

_ACTIVATIONS: Final[dict[str, EncoderActivation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_ROBERTA_PADDING: Final = 1


def _bert(fields: Fields) -> Facts:
    return _learned(fields, offset=0, token_types=fields.integer("type_vocab_size", 1, 1 << 10))


def _roberta(fields: Fields) -> Facts:
    """Positions are counted from the one after the padding token's id."""
    offset = fields.integer("pad_token_id", 0, 1 << 24, default=_ROBERTA_PADDING) + 1
    return _learned(fields, offset=offset, token_types=fields.integer("type_vocab_size", 1, 1 << 10))


def _distilbert(fields: Fields) -> Facts:
    return _learned(fields, offset=0, token_types=0)


def _learned(fields: Fields, *, offset: int, token_types: int) -> Facts:
    rows = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    if rows <= offset:
        raise fields.error(
            "max_position_embeddings", rows, f"expected more than {offset}, the row of the first token"
        )
    return {
        "rope_theta": 10000.0,  # not used
        "max_position_embeddings": rows - offset,
        "rotary_dim": None,
        "biases": Biases(qkv=True, attention_out=True, mlp=True),
        "encoder": EncoderSpec(
            post_norm=True,
            activation=encoder_activation(fields, "hidden_act"),
            position_rows=rows,
            position_offset=offset,
            token_types=token_types,
        ),
    }


def encoder_activation(
    fields: Fields, name: str, known: tuple[str, ...] = tuple(_ACTIVATIONS)
) -> EncoderActivation:
    """The activation of the MLP, of those that this encoder can have."""
    value = fields.text(name, default="gelu")
    if value not in known:
        raise fields.error(name, value, f"which is not supported; supported are: {', '.join(known)}")
    return _ACTIVATIONS[value]


_NAMES: Final = {"layer_norm_eps": "rms_norm_eps"}
_DEFAULTS: Final = {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512}

FAMILIES: Final = (
    *(
        Family(
            model_type,
            structure="bert",
            architecture=architecture,
            read=read,
            renamed=_NAMES,
            is_encoder=True,
            defaults=_DEFAULTS,
        )
        for model_type, architecture, read in (
            ("bert", "Bert", _bert),
            ("roberta", "Roberta", _roberta),
            ("xlm-roberta", "XLMRoberta", _roberta),
        )
    ),
    Family(
        "distilbert",
        structure="bert",
        architecture="DistilBert",
        read=_distilbert,
        renamed={
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size",
            "activation": "hidden_act",
        },
        is_encoder=True,
        defaults={"rms_norm_eps": 1e-12, "max_position_embeddings": 512},
    ),
)
