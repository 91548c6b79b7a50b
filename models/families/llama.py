"""Llama and Mistral. GGUF files of both say `llama`, also those of Mixtral; those of Mistral mention no window."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.experts_spec import MIXTRAL_NAMES
from ..spec.layer_form import Biases
from ..spec.model_spec import FilesSpec
from .family import GGUF, Facts, Family
from .gguf_readers import mixture_of
from .hf_readers import rope_facts, window_everywhere
from .hf_rope import read_rope


def _llama(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    facts = rope_facts(fields, read_rope(fields)) | {
        "biases": Biases(qkv=bias, attention_out=bias, mlp=fields.boolean("mlp_bias", default=False)),
    }
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    of_images = set(fields.integers("cross_attention_layers", 0, num_layers - 1))  # of Llama 3.2 Vision
    if len(of_images) == num_layers:
        raise fields.error(
            "cross_attention_layers", sorted(of_images), "expected a layer that attends to text"
        )
    if of_images:
        files = FilesSpec(image_layers=tuple(sorted(of_images)))
        facts |= {"num_layers": num_layers - len(of_images), "files": files}
    return facts


def _mistral(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | window_everywhere(fields, missing=4096)


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
