"""The configuration of an encoder: its classes, what is refused, and the usual names of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..families.family import Family
from ..fields import Fields

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


def encoder_fields(fields: Fields, config: Mapping[str, object], family: Family) -> Fields:
    """The fields of an encoder under the usual names.

    Raises:
        ConfigError: the model is not a plain encoder, or needs something that is not implemented.
    """
    _check(fields, family)
    given = {name: value for name, value in config.items() if value is not None}
    common = family.with_common_names({**family.defaults, **given})
    # An encoder has no output head; the heads of its training are ignored.
    return Fields(fields.path, {**common, "tie_word_embeddings": True, "eos_token_id": None})


def _check(fields: Fields, family: Family) -> None:
    architectures = fields.get("architectures")
    known = {family.architecture + task for task in _TASKS}
    if isinstance(architectures, list) and not known.issuperset(map(str, architectures)):
        raise fields.error(
            "architectures",
            architectures,
            f"expected one of {', '.join(family.architecture + task for task in _TASKS)}",
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
