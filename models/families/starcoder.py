"""StarCoder2. Its GGUF files mention no window, as llama.cpp computes none."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.layer_form import Biases, LayerForm
from .family import GGUF, LAYER_NAMES, LAYER_NORM_EPS, Facts, Family
from .hf_readers import rope_facts, window_everywhere
from .hf_rope import read_rope

FORM: Final = LayerForm(norm="layer", norm_bias=True, mlp="plain", mlp_names=("c_fc", "c_proj"))


def _starcoder2(fields: Fields) -> Facts:
    bias = fields.boolean("use_bias", default=True)
    return (
        rope_facts(fields, read_rope(fields))
        | window_everywhere(fields)
        | {"biases": Biases(qkv=bias, attention_out=bias, mlp=bias), "form": FORM}
    )


def _starcoder2_gguf(fields: Fields, arch: str) -> Facts:
    return {"form": FORM}


_NAMES: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if not module.startswith("mlp.")},
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


FAMILIES: Final = (
    Family(
        "starcoder2",
        structure="llama",
        published="StarCoder2",
        architecture="Starcoder2ForCausalLM",
        read=_starcoder2,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm_eps="norm_epsilon",
        gguf={"starcoder2": GGUF(_starcoder2_gguf, _NAMES, norm_eps=LAYER_NORM_EPS)},
    ),
)
