"""Llama and Mistral. GGUF files of both say `llama`, also those of Mixtral; those of Mistral mention no window."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.experts_spec import MIXTRAL_NAMES
from ..spec.layer_form import Biases
from .family import GGUF, Facts, Family
from .gguf_readers import mixture_of
from .hf_readers import rope_facts, window_everywhere
from .hf_rope import read_rope


def _llama(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "biases": Biases(qkv=bias, attention_out=bias, mlp=fields.boolean("mlp_bias", default=False)),
    }


def _mistral(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | window_everywhere(fields)


def _llama_or_mixtral(fields: Fields, arch: str) -> Facts:
    """Facts of a file that says `llama`: with experts it is Mixtral."""
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) == 0:
        return {}
    return {"model_type": "mixtral", "experts": mixture_of(fields, arch, MIXTRAL_NAMES)}


FAMILIES: Final = (
    Family(
        "llama",
        structure="llama",
        published="Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2, TinyLlama, Yi",
        architecture="LlamaForCausalLM",
        read=_llama,
        gguf={"llama": GGUF(_llama_or_mixtral, has_experts=True, neighbors=True)},
    ),
    Family(
        "mistral",
        structure="llama",
        published="Mistral 7B, Mistral Nemo, Mistral Small, Codestral",
        architecture="MistralForCausalLM",
        read=_mistral,
        stored_as="llama",
    ),
)
