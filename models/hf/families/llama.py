"""Llama and Mistral."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts, window_everywhere


def _llama(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


def _mistral(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | window_everywhere(fields)


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
}
