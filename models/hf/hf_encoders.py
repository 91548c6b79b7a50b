"""The fields of config.json for encoders: BERT and RoBERTa in their variants, and ModernBERT.

A feature that changes the computation and is not implemented is refused by name, as everywhere in this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ..fields import Fields
from ..spec.encoder_spec import EncoderActivation, EncoderSpec
from .families.family import Facts, Family, layer_types
from .hf_rope import MAX_POSITIONS, read_two_ropes

_ACTIVATIONS: Final[dict[str, EncoderActivation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_GATED: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu")
_TASKS: Final = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""Endings of the names of architectures: what is on top of the encoder is ignored, or read as a pooling head."""
_REFUSED: Final[dict[str, str]] = {
    "is_decoder": "an encoder is needed",
    "add_cross_attention": "attention to another text is not supported",
}
UNSUPPORTED_ENCODERS: Final[dict[str, str]] = {
    "albert": "embeddings of another size and shared layers are not supported",
    "deberta": "relative positions are not supported",
    "deberta-v2": "relative positions are not supported",
    "electra": "this encoder is not supported",
    "mpnet": "relative position biases are not supported",
    "nomic_bert": "this encoder is not supported",
    "t5": "relative position biases are not supported",
}
"""`model_type` values of encoders that people use for embeddings, and why they are refused."""

_MODERNBERT_EVERY: Final = 3  # every third layer, from the first on, has no window
_ROBERTA_PADDING: Final = 1


class _EncoderFamily(NamedTuple):
    """How to read one `model_type`.

    Attributes:
        classes: how the names of its architectures in transformers begin.
        names: usual name of a field -> its name in this family.
        defaults: values of missing fields, as in transformers.
    """

    classes: str
    read: Callable[[Fields], Facts]
    names: dict[str, str]
    defaults: dict[str, object]


def encoder_fields(fields: Fields, config: Mapping[str, object], model_type: str) -> tuple[Fields, Family]:
    """The fields of an encoder under the usual names, and the reader of those that only encoders have.

    Raises:
        ConfigError: the model is not a plain encoder, or needs something that is not implemented.
    """
    family = _FAMILIES[model_type]
    _check(fields, family)
    common = {**family.defaults, **{name: value for name, value in config.items() if value is not None}}
    for name, theirs in family.names.items():
        if theirs in common:
            common[name] = common[theirs]
    # An encoder has no output head; the heads of its training are ignored.
    common |= {"tie_word_embeddings": True, "eos_token_id": None}
    return Fields(fields.path, common), Family("", family.read)


def _check(fields: Fields, family: _EncoderFamily) -> None:
    architectures = fields.get("architectures")
    known = {family.classes + task for task in _TASKS}
    if isinstance(architectures, list) and not known.issuperset(map(str, architectures)):
        raise fields.error(
            "architectures",
            architectures,
            f"expected one of {', '.join(family.classes + task for task in _TASKS)}",
        )
    for name, rule in _REFUSED.items():
        if fields.get(name):
            raise fields.error(name, fields.get(name), rule)
    kind = fields.text("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise fields.error("position_embedding_type", kind, "only 'absolute' is supported")
    if fields.get("quantization_config"):
        raise fields.error(
            "quantization_config",
            fields.get("quantization_config"),
            "encoders need weights that are not quantized",
        )


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
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "encoder": EncoderSpec(
            post_norm=True,
            activation=_activation(fields, "hidden_act", tuple(_ACTIVATIONS)),
            position_rows=rows,
            position_offset=offset,
            token_types=token_types,
        ),
    }


def _modernbert(fields: Fields) -> Facts:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    if fields.get("layer_types") is not None:
        windowed = layer_types(fields)
    else:
        every = fields.integer("global_attn_every_n_layers", 1, 1 << 12, default=_MODERNBERT_EVERY)
        windowed = tuple(layer % every != 0 for layer in range(num_layers))
    rope, local_theta = read_two_ropes(fields, 160_000.0, "local_rope_theta", 10_000.0)
    if rope.partial_factor != 1.0:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "only 1.0 is supported")
    bias = fields.boolean("attention_bias", default=False)
    facts: Facts = {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "encoder": EncoderSpec(
            post_norm=False,
            activation=_activation(fields, "hidden_activation", _GATED),
            gated_mlp=True,
            norm_bias=fields.boolean("norm_bias", default=False),
        ),
    }
    if any(windowed):
        reach = fields.integer("local_attention", 0, MAX_POSITIONS, default=128) // 2  # to each side
        facts |= {
            "sliding_window": 2 * reach + 1,
            "windowed_layers": windowed,
            "local_rope_theta": local_theta,
        }
    return facts


def _activation(fields: Fields, name: str, known: tuple[str, ...]) -> EncoderActivation:
    value = fields.text(name, default="gelu")
    if value not in known:
        raise fields.error(name, value, f"which is not supported; supported are: {', '.join(known)}")
    return _ACTIVATIONS[value]


_BERT_NAMES: Final = {"rms_norm_eps": "layer_norm_eps"}
_BERT_DEFAULTS: Final[dict[str, Any]] = {
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
}
_DISTILBERT_NAMES: Final = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
_MODERNBERT_DEFAULTS: Final[dict[str, Any]] = {"norm_eps": 1e-5, "global_rope_theta": 160_000.0}

_FAMILIES: Final[dict[str, _EncoderFamily]] = {
    "bert": _EncoderFamily("Bert", _bert, _BERT_NAMES, _BERT_DEFAULTS),
    "roberta": _EncoderFamily("Roberta", _roberta, _BERT_NAMES, _BERT_DEFAULTS),
    "xlm-roberta": _EncoderFamily("XLMRoberta", _roberta, _BERT_NAMES, _BERT_DEFAULTS),
    "distilbert": _EncoderFamily(
        "DistilBert", _distilbert, _DISTILBERT_NAMES, {"rms_norm_eps": 1e-12, "max_position_embeddings": 512}
    ),
    "modernbert": _EncoderFamily(
        "ModernBert",
        _modernbert,
        {"rms_norm_eps": "norm_eps", "rope_theta": "global_rope_theta"},
        _MODERNBERT_DEFAULTS,
    ),
}
