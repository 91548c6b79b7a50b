"""Seed-OSS."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts


def _seed_oss(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | {
        "attention_bias": fields.boolean("attention_bias", default=True),
        "attention_out_bias": fields.boolean("attention_out_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


FAMILIES: Final[dict[str, Family]] = {"seed_oss": Family("SeedOssForCausalLM", _seed_oss, head_dim=128)}
