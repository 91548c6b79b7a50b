"""ModelSpec: the facts about a model's architecture that the rest of the engine computes with.

Read from a model's files by `hf_config` and `gguf_config` (see `load_spec`); carried to every process inside
messages. It holds no tensors and no paths, and says nothing about devices: memory planning and model building take it
from here.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

SUPPORTED_MODEL_TYPES: Final = ("llama",)
"""Hugging Face `model_type` values for which there is a model implementation."""

RopeKind = Literal["default", "linear", "llama3"]
DTypeName = Literal["float32", "bfloat16", "float16"]


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched for longer contexts.

    `linear` divides all frequencies by `factor`. `llama3` divides those whose wavelength is above
    original_max_position / low_freq_factor, keeps those below original_max_position / high_freq_factor, and
    blends between. Only `llama3` uses the last three fields.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture of one decoder-only model; names follow Hugging Face's config.json where they are good."""

    model_type: str  # of Hugging Face; names the module in model_runner/models
    vocab_size: int  # rows of the embedding: the width of the logits
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    torch_dtype: DTypeName  # what the weights were saved in, or the best choice for a quantised file
    eos_token_ids: tuple[int, ...] = ()  # sampling one of them ends a text
    bos_token_id: int | None = None

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied output head counts once."""
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        if self.attention_bias:
            attention += q_size + 2 * kv_size + self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        layer = attention + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Memory of the weights when each takes `dtype_bytes`."""
        return self.num_parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Memory of one token's keys and values over all layers, each number `dtype_bytes` wide."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def contradiction(self) -> str | None:
        """What in these facts cannot be true together, or None; the readers put the file's name before it."""
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
        if self.head_dim % 2:
            return f"head_dim is {self.head_dim}, rotary position embedding needs an even number"
        scaling = self.rope_scaling
        if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
            return (
                f"llama3 rope scaling has high_freq_factor {scaling.high_freq_factor:g}, "
                f"it must be above low_freq_factor {scaling.low_freq_factor:g}"
            )
        return None
