"""Architecture facts from the metadata and the tensor directory of a GGUF file.

GGUF's architecture `llama` is also used for variants of Llama (mixtures of experts, partial rotary); a feature that
changes the computation and is not implemented is refused by name.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import structs

from ...errors import ConfigError
from ..block_forms import GGUF_FORMS
from ..fields import Fields
from ..hf.hf_families import windows_by_pattern
from ..model_spec import DTypeName, ExpertsSpec, ModelSpec
from ..quantization import QuantizationSpec
from .gguf_file import GGUFFile
from .gguf_names import FUSED, stacked_names, stored_names
from .gguf_rope import read_gguf_rope_scaling
from .gguf_sampling import read_gguf_sampling

_MODEL_TYPES: Final = {  # GGUF architecture -> Hugging Face model_type
    "llama": "llama",  # and Mistral; its files do not mention a window
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_GEMMA3_27B_LAYERS: Final = 62
_EOS_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of turn, of message
_NATIVE_DTYPES: Final[dict[str, DTypeName]] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    """The architecture of the model in `file`.

    Raises:
        ConfigError: a key is missing or wrong, or the model needs something that is not implemented.
    """
    fields = Fields(file.path, file.metadata)
    arch = fields.text("general.architecture")
    if arch not in _MODEL_TYPES:
        raise fields.error(
            "general.architecture", arch, f"which is not supported; supported are: {', '.join(_MODEL_TYPES)}"
        )
    if arch != "qwen3moe" and fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) > 0:
        raise fields.error(
            f"{arch}.expert_count", fields.get(f"{arch}.expert_count"), "experts are not supported"
        )
    vocab_size = _vocab_size(file, fields, arch)
    hidden_size = fields.integer(f"{arch}.embedding_length", 1, 1 << 20)
    num_heads = fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    head_dim = _head_dim(fields, arch, hidden_size // num_heads)
    rotary_dim = fields.integer(f"{arch}.rope.dimension_count", 1, head_dim, default=head_dim)
    rope_theta = fields.number(f"{arch}.rope.freq_base", 1.0, 1e15, default=10000.0)
    eos_token_ids = [
        token_id for key in _EOS_KEYS for token_id in fields.token_ids(f"tokenizer.ggml.{key}", vocab_size)
    ]
    spec = ModelSpec(
        model_type=_MODEL_TYPES[arch],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length", 1, 1 << 22),
        num_layers=fields.integer(f"{arch}.block_count", 1, 1 << 12),
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", 1, num_heads, default=num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-30, 1.0),
        rope_theta=rope_theta,
        rope_scaling=read_gguf_rope_scaling(file, fields, arch, rotary_dim, rope_theta),
        max_position_embeddings=fields.integer(f"{arch}.context_length", 1, 1 << 30),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & set(file.tensors)),
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        torch_dtype=_dtype(file),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        bos_token_id=fields.known_token_id("tokenizer.ggml.bos_token_id", vocab_size),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        sampling_defaults=read_gguf_sampling(file),
        **_family_facts(fields, arch, num_heads, hidden_size),
    )
    spec = structs.replace(
        spec, max_position_embeddings=spec.known_positions, quantization=_quantization(file, spec)
    )
    if contradiction := spec.contradiction():
        raise ConfigError(f"{file.path}: {contradiction}")
    return spec


def _quantization(file: GGUFFile, spec: ModelSpec) -> QuantizationSpec | None:
    """The modules stored in blocks that can stay quantized; None: there are none."""
    types: dict[str, str] = {}
    for name, stored, _ in stored_names(spec, experts=False):
        info = file.tensors.get(stored)
        if info is None or len(info.shape) != 2:
            continue
        if name.endswith(".weight") and info.ggml_type.name in GGUF_FORMS:
            module = name.removesuffix(".weight")
            types[module] = info.ggml_type.name
            for fused, parts in FUSED.items():
                if module.endswith(fused):  # memory is summed by the names of the parts
                    types |= {module.replace(fused, part): info.ggml_type.name for part in parts}
    for module, stored in stacked_names(spec):
        info = file.tensors.get(stored)
        if info is not None and len(info.shape) == 3 and info.ggml_type.name in GGUF_FORMS:
            types[module] = info.ggml_type.name
    return QuantizationSpec(method="gguf", types=types) if types else None


def _vocab_size(file: GGUFFile, fields: Fields, arch: str) -> int:
    """Rows of the embedding; files pad it beyond the number of tokens, and the metadata sometimes omits it."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    return fields.integer(f"{arch}.vocab_size", 1, 1 << 24)


def _head_dim(fields: Fields, arch: str, default: int) -> int:
    head_dim = fields.integer(f"{arch}.attention.key_length", 1, 1 << 12, default=default)
    key = f"{arch}.attention.value_length"
    value = fields.integer(key, 1, 1 << 12, default=head_dim)
    if value != head_dim:
        raise fields.error(key, value, f"expected the head size {head_dim}: values must be as wide as keys")
    key = f"{arch}.rope.dimension_count"
    rotated = fields.integer(key, 1, 1 << 12, default=head_dim)
    if rotated != head_dim and (arch != "phi3" or rotated > head_dim):
        rule = f"expected the head size {head_dim}: rotary over a part of the head is not supported"
        raise fields.error(key, rotated, rule)
    return head_dim


def _family_facts(fields: Fields, arch: str, num_heads: int, hidden_size: int) -> dict[str, Any]:
    """The fields that the architecture adds to or changes in the common ones."""
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    if arch == "phi3":
        window = fields.integer(f"{arch}.attention.sliding_window", 0, 1 << 30, default=0)
        return {"sliding_window": window, "windowed_layers": (True,) * num_layers} if window else {}
    if arch == "qwen3":
        return {"qk_norm": True}
    if arch == "qwen3moe":
        experts = ExpertsSpec(
            num_experts=fields.integer(f"{arch}.expert_count", 1, 1 << 16),
            num_active=fields.integer(f"{arch}.expert_used_count", 1, 1 << 16),
            intermediate_size=fields.integer(f"{arch}.expert_feed_forward_length", 1, 1 << 22),
            normalize=True,  # llama.cpp always normalizes
        )
        return {"qk_norm": True, "experts": experts}
    if arch == "gemma3":
        return _gemma3_facts(fields, num_layers, num_heads, hidden_size)
    return {}


def _gemma3_facts(fields: Fields, num_layers: int, num_heads: int, hidden_size: int) -> dict[str, Any]:
    for key in ("gemma3.attn_logit_softcapping", "gemma3.final_logit_softcapping"):
        if fields.number(key, 0.0, 1e9, default=0.0):
            raise fields.error(key, fields.get(key), "capped scores and logits are not supported")
    pattern = fields.integer("gemma3.attention.sliding_window_pattern", 1, 1 << 12, default=6)
    facts: dict[str, Any] = {
        "qk_norm": True,
        "norms_per_layer": 4,
        "float32_norms": True,
        "sliding_window": fields.integer("gemma3.attention.sliding_window", 1, 1 << 30),
        "windowed_layers": windows_by_pattern(pattern, num_layers),
        "local_rope_theta": fields.number("gemma3.rope.freq_base_swa", 1.0, 1e15, default=10000.0),
    }
    if num_layers == _GEMMA3_27B_LAYERS:  # the file does not say; the others scale by the head size
        facts["query_scale"] = (hidden_size / num_heads) ** -0.5
    return facts


def _dtype(file: GGUFFile) -> DTypeName:
    """The dtype of the first layer's weights; bfloat16 for quantized ones, because their error is larger anyway."""
    for name in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight", "token_embd.weight"):
        if name in file.tensors:
            return _NATIVE_DTYPES.get(file.tensors[name].ggml_type.name, "bfloat16")
    return "bfloat16"
