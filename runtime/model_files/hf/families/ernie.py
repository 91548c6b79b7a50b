"""ERNIE 4.5 without experts."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...layer_form import LayerForm
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts

FORM: Final = LayerForm(interleaved_rope=True)


def _ernie4_5(fields: Fields) -> Facts:
    bias = fields.boolean("use_bias", default=False)
    return rope_facts(fields, read_rope(fields, 500_000.0)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "form": FORM,
    }


FAMILIES: Final[dict[str, Family]] = {
    "ernie4_5": Family("Ernie4_5ForCausalLM", _ernie4_5, tied=True, head_dim=128),
}
