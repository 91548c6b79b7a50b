"""Ministral: `ministral` is that of 2024, `ministral3` that of 2025, with queries scaled by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...fields import Fields
from ...spec.attention_form import TemperatureTuning
from ..hf_rope import MAX_POSITIONS, read_rope
from .family import Facts, Family, layer_types, rope_facts, window_everywhere

_BETA: Final = "llama_4_scaling_beta"


def _ministral(fields: Fields) -> Facts:
    windows = window_everywhere(fields)
    if windows and fields.get("layer_types") is not None:
        windows["windowed_layers"] = layer_types(fields)
    return rope_facts(fields, read_rope(fields)) | windows


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
    return facts | {"temperature": temperature}


FAMILIES: Final[dict[str, Family]] = {
    "ministral": Family("MinistralForCausalLM", _ministral),
    "ministral3": Family("Ministral3ForCausalLM", _ministral3, head_dim=128),
}
