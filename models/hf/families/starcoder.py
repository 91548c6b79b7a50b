"""StarCoder2."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...spec.layer_form import LayerForm
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts, window_everywhere

FORM: Final = LayerForm(norm="layer", norm_bias=True, mlp="plain", mlp_names=("c_fc", "c_proj"))


def _starcoder2(fields: Fields) -> Facts:
    bias = fields.boolean("use_bias", default=True)
    return (
        rope_facts(fields, read_rope(fields))
        | window_everywhere(fields)
        | {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bias, "form": FORM}
    )


FAMILIES: Final[dict[str, Family]] = {
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        _starcoder2,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm_eps="norm_epsilon",
    )
}
