"""Ministral 8B (`ministral`, in GGUF `llama`) and Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.layer_form import AttentionForm, TemperatureTuning
from .family import GGUF, Facts, Family
from .hf_readers import layer_types, rope_facts, window_everywhere
from .hf_rope import MAX_POSITIONS, read_rope

_BETA: Final = "llama_4_scaling_beta"


def _ministral(fields: Fields) -> Facts:
    facts = window_everywhere(fields, missing=4096)
    if facts and fields.get("layer_types") is not None:
        facts["windows"] = structs.replace(facts["windows"], layers=layer_types(fields))
    return rope_facts(fields, read_rope(fields)) | facts


def _ministral3(fields: Fields) -> Facts:
    name = fields.given("rope_parameters", "rope_scaling")
    values = fields.get(name)
    if not isinstance(values, Mapping) or not values:
        raise fields.error(
            name, values, "which transformers takes for yarn by 16; write the values into the file"
        )
    inner = Fields(fields.path, values, prefix=f"{name}.")
    beta = inner.number(_BETA, 0.0, 1e3, default=0.0)
    temperature = None
    if beta:
        length = inner.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
        temperature = TemperatureTuning(scale=beta, length=length)
    facts = rope_facts(fields, read_rope(fields, 1_000_000.0)) | window_everywhere(fields)
    return facts | {"attention": AttentionForm(temperature=temperature)}


def _mistral3(fields: Fields, arch: str) -> Facts:
    key = f"{arch}.attention.scale"
    if fields.number(key, 0.0, 1e9, default=0.0):
        raise fields.error(key, fields.get(key), "another scale of the scores is not supported")
    scale = fields.number(f"{arch}.attention.temperature_scale", 0.0, 1e3, default=0.0)
    if not scale or fields.get(f"{arch}.rope.scaling.type") != "yarn":
        return {}
    length = fields.integer(f"{arch}.rope.scaling.original_context_length", 2, 1 << 30)
    return {"attention": AttentionForm(temperature=TemperatureTuning(scale=scale, length=length))}


FAMILIES: Final = (
    Family(
        "ministral",
        structure="llama",
        published="Ministral 8B",
        architecture="MinistralForCausalLM",
        read=_ministral,
        stored_as="llama",
    ),
    Family(
        "ministral3",
        structure="llama",
        published="Ministral 3",
        architecture="Ministral3ForCausalLM",
        read=_ministral3,
        head_dim=128,
        gguf={"mistral3": GGUF(_mistral3, neighbors=True)},
    ),
)
