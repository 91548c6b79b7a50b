"""Facts about an architecture that the engine has no model for, so that transformers' implementation can serve it.

Memory and attention need few of them: heads, layers, lengths, windows. Most configurations use the same names for
them, older ones use others, and both are read. Known unsupported features are refused here, before loading; the rest
is found when the model is loaded and its attention compared (`model_runner/hf_backend/transformers_check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from ..families.family import Facts, Family
from ..families.hf_readers import layer_types, score_cap, window_everywhere
from ..fields import Fields
from ..spec.experts_spec import ExpertsSpec, Routing
from .task import architectures_of

_OTHER_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
}
_HEADS: Final = ("ForCausalLM", "LMHeadModel")
_MLP_WIDENING: Final = (
    4  # times the hidden size, if the file has no value: as in GPT-2, for memory planning only
)
_REFUSED: Final[dict[str, str]] = {
    "is_encoder_decoder": "a decoder without an encoder is needed",
    "alibi": "position biases (ALiBi) are not supported",
    "hc_mult": "hyper-connections, which mix several residual streams of a token, are not supported",
    "compress_ratios": "attention to compressed tokens is not supported",
    "sparse_attention_config": "sparse attention, which chooses blocks of tokens, is not supported",
    "blocksparse_block_size": "sparse attention, which chooses blocks of tokens, is not supported",
    "index_topk": "sparse attention, which chooses the tokens of latent attention (MLA), is not supported",
    "kv_lora_rank": "latent attention (MLA) is supported for DeepSeek, Kimi, GLM and MiniCPM3 only",
    "add_swa_attention_sink_bias": "attention sinks are supported for gpt_oss and mimo_v2_flash only",
    "add_full_attention_sink_bias": "attention sinks are supported for gpt_oss and mimo_v2_flash only",
    "attention_chunk_size": "attention in chunks is not supported",
    "use_bidirectional_attention": "only attention to earlier tokens is supported",
}
_REFUSED_TYPES: Final[dict[str, str]] = {
    "kimi_linear": "whose layers have states of a kind that is not supported (Kimi delta attention)",
}
"""`model_type` values, and what their layers need."""
_OF_IMAGES: Final = "vision"
"""Value of `use_bidirectional_attention` that concerns the tokens of images only."""
_STRUCTURE: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def with_common_names(config: Mapping[str, object], fields: Fields) -> dict[str, object]:
    """A configuration with the usual names added for other names, and defaults for fields without effect.

    Raises:
        ConfigError: two names of one size have different values.
    """
    common = dict(config)
    for name, others in _OTHER_NAMES.items():
        if name in _STRUCTURE:
            fields.given(name, *others)
        values = (config[other] for other in others if config.get(other) is not None)
        if config.get(name) is None and (value := next(values, None)) is not None:
            common[name] = value
    if config.get("multi_query") is True:
        common.setdefault("num_key_value_heads", 1)
    hidden_size = common.get("hidden_size")
    if common.get("intermediate_size") is None and isinstance(hidden_size, int):
        common["intermediate_size"] = _MLP_WIDENING * hidden_size
    if common.get("rms_norm_eps") is None:
        common["rms_norm_eps"] = 1e-5  # read by the engine's own layers only
    return common


def refuse_unsupported(fields: Fields) -> None:
    """Refuse an architecture, known or not, with layers that need what is not supported.

    Raises:
        ConfigError: it is one of these.
    """
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in _REFUSED_TYPES:
        raise fields.error("model_type", model_type, _REFUSED_TYPES[model_type])
    for name, rule in _REFUSED.items():
        if fields.get(name) and fields.get(name) != _OF_IMAGES:
            raise fields.error(name, fields.get(name), rule)


def other_family(fields: Fields) -> Family:
    """The reader for any other architecture.

    Raises:
        ConfigError: it is not a text decoder, or needs attention that the engine does not compute.
    """
    refuse_unsupported(fields)
    if fields.get("position_embedding_type") == "alibi":
        raise fields.error("position_embedding_type", "alibi", _REFUSED["alibi"])
    architectures = architectures_of(fields)
    if architectures and not any(name.endswith(_HEADS) for name in architectures):
        raise fields.error(
            "architectures",
            fields.get("architectures"),
            f"expected one that ends with {' or '.join(_HEADS)}",
        )
    return Family("", structure="", architecture="", read=_facts)


def _facts(fields: Fields) -> Facts:
    """transformers computes rotary; its base is in the spec because the field is required."""
    return {"rope_theta": 10000.0} | _windows(fields) | _experts(fields) | score_cap(fields)


def _windows(fields: Fields) -> Facts:
    has_types = fields.get("layer_types") is not None
    windowed = layer_types(fields) if has_types else ()  # refuses layers without attention
    if not fields.get("sliding_window") or not fields.boolean("use_sliding_window", default=True):
        return {}
    everywhere = window_everywhere(fields)
    if not has_types:
        return everywhere
    if not any(windowed):
        return {}
    return {"windows": structs.replace(everywhere["windows"], layers=windowed)}


def _experts(fields: Fields) -> Facts:
    """For memory planning: shared experts are not counted."""
    if fields.get("num_experts") is None:
        return {}
    num_experts = fields.integer("num_experts", 0, 1 << 16)
    if num_experts <= 1:
        return {}
    width = fields.integer("intermediate_size", 1, 1 << 22)
    experts = ExpertsSpec(
        num_experts=num_experts,
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22, default=width),
        routing=Routing(
            num_active=fields.integer("num_experts_per_tok", 1, 1 << 16, default=num_experts),
            normalize=False,
        ),
    )
    return {"experts": experts}
