"""Seed-OSS."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.layer_form import Biases
from .family import GGUF, LAYER_NAMES, Facts, Family
from .gguf_readers import no_facts
from .hf_readers import rope_facts
from .hf_rope import read_rope


def _seed_oss(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | {
        "biases": Biases(
            qkv=fields.boolean("attention_bias", default=True),
            attention_out=fields.boolean("attention_out_bias", default=False),
            mlp=fields.boolean("mlp_bias", default=False),
        ),
    }


_NAMES: Final = {**LAYER_NAMES, "post_attention_layernorm": "post_attention_norm"}


FAMILIES: Final = (
    Family(
        "seed_oss",
        structure="llama",
        published="Seed-OSS",
        architecture="SeedOssForCausalLM",
        read=_seed_oss,
        head_dim=128,
        gguf={"seed_oss": GGUF(no_facts, _NAMES)},
    ),
)
