"""Architecture facts from the metadata and the tensor directory of a GGUF file.

GGUF's architecture `llama` is also used for models that are not quite Llama (mixtures of experts, partial
rotary); what would change the computation and is not implemented is refused by name.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .fields import Fields
from .gguf import GGUFFile
from .model_spec import DTypeName, ModelSpec, RopeScaling

_MODEL_TYPES: Final = {"llama": "llama"}  # GGUF architecture -> Hugging Face model_type
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
    if fields.integer("split.count", 0, 1 << 16, default=0) > 1:
        raise fields.error(
            "split.count",
            fields.get("split.count"),
            "a model in several GGUF files is not supported; merge them with llama-gguf-split --merge",
        )
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) > 0:
        raise fields.error(
            f"{arch}.expert_count", fields.get(f"{arch}.expert_count"), "experts are not supported"
        )
    vocab_size = _vocab_size(file, fields, arch)
    hidden_size = fields.integer(f"{arch}.embedding_length", 1, 1 << 20)
    num_heads = fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    head_dim = _head_dim(fields, arch, hidden_size // num_heads)
    rope_theta = fields.number(f"{arch}.rope.freq_base", 1.0, 1e15, default=10000.0)
    bos_token_ids = fields.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
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
        rope_scaling=_rope_scaling(file, fields, arch, head_dim, rope_theta),
        max_position_embeddings=fields.integer(f"{arch}.context_length", 1, 1 << 30),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        torch_dtype=_dtype(file),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
    )
    if contradiction := spec.contradiction():
        raise ConfigError(f"{file.path}: {contradiction}")
    return spec


def _vocab_size(file: GGUFFile, fields: Fields, arch: str) -> int:
    """Rows of the embedding, which files pad beyond the tokens and metadata sometimes omits."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    return fields.integer(f"{arch}.vocab_size", 1, 1 << 24)


def _head_dim(fields: Fields, arch: str, default: int) -> int:
    head_dim = fields.integer(f"{arch}.attention.key_length", 1, 1 << 12, default=default)
    for key, what in (
        (f"{arch}.attention.value_length", "values must be as wide as keys"),
        (f"{arch}.rope.dimension_count", "rotary over a part of the head is not supported"),
    ):
        value = fields.integer(key, 1, 1 << 12, default=head_dim)
        if value != head_dim:
            raise fields.error(key, value, f"expected the head size {head_dim}: {what}")
    return head_dim


def _rope_scaling(file: GGUFFile, fields: Fields, arch: str, head_dim: int, rope_theta: float) -> RopeScaling:
    kind = fields.text(f"{arch}.rope.scaling.type", default="none")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number(f"{arch}.rope.scaling.factor", 1.0, 1e6))
    if kind != "none":
        raise fields.error(
            f"{arch}.rope.scaling.type", kind, "which is not supported; supported are: none, linear"
        )
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, rope_theta)
    return RopeScaling()


def _llama3_scaling(file: GGUFFile, head_dim: int, rope_theta: float) -> RopeScaling:
    """Recognise Llama 3 scaling in the tensor of frequency divisors, the only trace it leaves in GGUF.

    The largest divisor is `factor`; all Llama 3 models share the other constants, which is checked by
    computing the whole tensor from them.
    """
    divisors = file.read("rope_freqs.weight")
    if divisors.shape != (head_dim // 2,) or not np.isfinite(divisors).all() or divisors.max() < 1:
        raise ConfigError(f"{file.path}: tensor 'rope_freqs.weight' must hold {head_dim // 2} divisors >= 1")
    scaling = RopeScaling(
        kind="llama3",
        factor=round(float(divisors.max()), 6),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    if scaling.factor == 1.0:
        return RopeScaling()
    if not np.allclose(divisors, _llama3_divisors(scaling, head_dim, rope_theta), rtol=1e-3):
        raise ConfigError(
            f"{file.path}: tensor 'rope_freqs.weight' is not the rope scaling of Llama 3; "
            "other per-frequency scalings are not supported"
        )
    return scaling


def _llama3_divisors(scaling: RopeScaling, head_dim: int, rope_theta: float) -> npt.NDArray[np.float64]:
    """What each rotary frequency is divided by, [head_dim / 2]; the formula is in `RopeScaling`."""
    wavelengths = 2 * math.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling.factor + smooth)
    return divisors


def _dtype(file: GGUFFile) -> DTypeName:
    """The type of the first layer's weights; bfloat16 for quantised ones, whose error is the larger one."""
    for name in ("blk.0.attn_q.weight", "token_embd.weight"):
        if name in file.tensors:
            return _NATIVE_DTYPES.get(file.tensors[name].ggml_type.name, "bfloat16")
    return "bfloat16"
