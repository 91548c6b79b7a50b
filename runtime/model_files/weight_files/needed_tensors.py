"""`needed_modules`: the modules of the engine's own models by name, with the shapes of their weights.

The names are those of Hugging Face's checkpoints; models in `model_runner/models` take exactly these. A start compares
them with the headers of the files, before any process exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from ..latent_spec import LatentSpec
    from ..model_spec import ModelSpec


KV_UP: Final = "self_attn.kv_b_proj"
"""Keys and values from latents; held per head in the serving dtype, whatever the form of linear layers."""


class Module(NamedTuple):
    """One module.

    Attributes:
        name: `<name>.weight` is its weight.
        shape: of the weight.
        is_linear: its weight may be quantized.
        has_bias: there is `<name>.bias`, one number for each output.
    """

    name: str
    shape: tuple[int, ...]
    is_linear: bool = False
    has_bias: bool = False

    @property
    def is_expert(self) -> bool:
        """Whether each expert of the layer has such a module."""
        return ".experts." in self.name

    @property
    def num_parameters(self) -> int:
        """Numbers of the weight and of the bias."""
        return math.prod(self.shape) + (self.shape[0] if self.has_bias else 0)


def needed_modules(spec: ModelSpec, *, one_expert: bool = False) -> Iterator[Module]:
    """All modules; the output head only if it is not tied to the embedding.

    Args:
        one_expert: of the experts of a layer, which have the same shapes, only the first.
    """
    table = (spec.vocab_size, spec.hidden_size)
    yield Module("model.embed_tokens", table)
    yield Module("model.norm", (spec.hidden_size,), has_bias=spec.form.norm_bias)
    if not spec.tie_word_embeddings:
        yield Module("lm_head", table)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for module in (*_norms(spec), *attention_modules(spec), *_mlp(spec, layer, one_expert)):
            yield module._replace(name=prefix + module.name)
    yield from pooling_modules(spec)


def pooling_modules(spec: ModelSpec) -> Iterator[Module]:
    """The layers after pooling with weights in the model's own files: a classifier."""
    for dense in () if spec.pooling is None else spec.pooling.dense:
        if dense.folder:
            continue
        shape = (dense.out_features, dense.in_features)
        yield Module(dense.weight.removesuffix(".weight"), shape, has_bias=bool(dense.bias))
        if dense.norm:
            yield Module(dense.norm.removesuffix(".weight"), (dense.out_features,))


def _norms(spec: ModelSpec) -> Iterator[Module]:
    for name in spec.form.norms:
        yield Module(name, (spec.hidden_size,), has_bias=spec.form.norm_bias)
    if spec.qk_norm:
        yield Module("self_attn.q_norm", (spec.head_dim,))
        yield Module("self_attn.k_norm", (spec.head_dim,))


def attention_modules(spec: ModelSpec) -> Iterator[Module]:
    """The modules of a layer's attention, by their names in the layer; without the norms of heads."""
    if spec.latent is not None:
        yield from _latent_attention(spec, spec.latent)
        return
    size, q_size, kv_size = (
        spec.hidden_size,
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
    )
    parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    if spec.model_type == "phi3":
        parts = {"qkv_proj": q_size + 2 * kv_size}
    for name, rows in parts.items():
        yield Module(f"self_attn.{name}", (rows, size), is_linear=True, has_bias=spec.attention_bias)
    yield Module("self_attn.o_proj", (size, q_size), is_linear=True, has_bias=spec.attention_out_bias)


def _latent_attention(spec: ModelSpec, latent: LatentSpec) -> Iterator[Module]:
    size, rank = spec.hidden_size, latent.kv_lora_rank
    q_size = spec.num_heads * latent.qk_head_dim
    if latent.q_lora_rank is None:
        yield Module("self_attn.q_proj", (q_size, size), is_linear=True)
    else:
        q_rank = latent.q_lora_rank
        yield Module("self_attn.q_a_proj", (q_rank, size), is_linear=True, has_bias=spec.attention_bias)
        yield Module("self_attn.q_a_layernorm", (q_rank,))
        yield Module("self_attn.q_b_proj", (q_size, q_rank), is_linear=True)
    yield Module(
        "self_attn.kv_a_proj_with_mqa", (latent.row_size, size), is_linear=True, has_bias=spec.attention_bias
    )
    yield Module("self_attn.kv_a_layernorm", (rank,))
    yield Module(
        KV_UP, (spec.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank), is_linear=True
    )
    yield Module(
        "self_attn.o_proj",
        (size, spec.num_heads * latent.v_head_dim),
        is_linear=True,
        has_bias=spec.attention_out_bias,
    )


def _mlp(spec: ModelSpec, layer: int, one_expert: bool) -> Iterator[Module]:
    size, experts = spec.hidden_size, spec.experts
    if experts is None or layer in experts.dense_layers:
        yield from _gated("mlp", size, spec.intermediate_size, spec)
        return
    yield Module("mlp.gate", (experts.num_experts, size))
    for expert in range(1 if one_expert else experts.num_experts):
        yield from _gated(f"mlp.experts.{expert}", size, experts.intermediate_size, spec)


def _gated(name: str, size: int, inner: int, spec: ModelSpec) -> Iterator[Module]:
    first = {"gate_proj": inner, "up_proj": inner}
    if spec.model_type == "phi3":
        first = {"gate_up_proj": 2 * inner}
    for part, rows in first.items():
        yield Module(f"{name}.{part}", (rows, size), is_linear=True, has_bias=spec.mlp_bias)
    yield Module(f"{name}.down_proj", (size, inner), is_linear=True, has_bias=spec.mlp_bias)
