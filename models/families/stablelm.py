"""StableLM 2 and StableLM 3B: Llama with layer norms, in which a part of each head rotates."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.layer_form import Biases, LayerForm
from .family import GGUF, LAYER_NORM_EPS, Facts, Family
from .hf_readers import partial_rope_facts
from .hf_rope import read_rope

_FORM: Final = LayerForm(norm="layer", norm_bias=True)


def _stablelm(fields: Fields) -> Facts:
    for name in ("qk_layernorm", "use_parallel_residual"):
        if fields.boolean(name, default=False):
            raise fields.error(name, True, "only false is supported")
    return partial_rope_facts(fields, read_rope(fields, default_partial=0.25)) | {
        "form": _FORM,
        "biases": Biases(qkv=fields.boolean("use_qkv_bias", default=False)),
    }


def _stablelm_gguf(fields: Fields, arch: str) -> Facts:
    if fields.boolean(f"{arch}.use_parallel_residual", default=False):
        raise fields.error(f"{arch}.use_parallel_residual", True, "only false is supported")
    return {"form": _FORM}


FAMILIES: Final = (
    Family(
        "stablelm",
        structure="llama",
        published="StableLM 3B, StableLM 2 1.6B, StableLM Zephyr",
        architecture="StableLmForCausalLM",
        read=_stablelm,
        norm_eps="layer_norm_eps",
        gguf={"stablelm": GGUF(_stablelm_gguf, partial_rotary=True, norm_eps=LAYER_NORM_EPS)},
    ),
)
