"""Granite 3."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...layer_form import LayerForm
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts


def _granite(fields: Fields) -> Facts:
    def multiplier(name: str) -> float:
        return fields.number(name, 1e-6, 1e6, default=1.0)

    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "query_scale": multiplier("attention_multiplier"),
        "form": LayerForm(
            embedding_scale=multiplier("embedding_multiplier"),
            residual_scale=multiplier("residual_multiplier"),
            logits_scale=1 / multiplier("logits_scaling"),
        ),
    }


FAMILIES: Final[dict[str, Family]] = {"granite": Family("GraniteForCausalLM", _granite)}
