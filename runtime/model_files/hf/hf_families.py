"""The fields of config.json for one architecture, beyond the common ones: one function per `model_type`.

Each returns the fields of `ModelSpec` that its family adds or changes. A feature that changes the computation and is
not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..fields import Fields
from ..model_spec import ExpertsSpec
from .hf_rope import MAX_POSITIONS, Rope, read_rope, read_two_ropes

Facts = dict[str, Any]

_GEMMA3_PATTERN: Final = 6  # every sixth layer has no window


class Family(NamedTuple):
    """How to read one `model_type`, and its defaults for missing fields."""

    architecture: str  # the class name in transformers
    read: Callable[[Fields], Facts]
    activation: str = "silu"  # the only supported one
    tied: bool = False
    head_dim: int | None = None  # None: hidden size divided by heads
    body: str = ""  # the class without an output head; "": that of `architecture`

    def classes(self, task: str) -> tuple[str, ...]:
        """The classes in transformers with the weights for a task; the first one is the usual one."""
        stem = self.architecture.removesuffix("ForCausalLM")
        body = self.body or f"{stem}Model"
        match task:
            case "embed":
                return self.architecture, body
            case "score":
                inner = body.removesuffix("Model")
                names = (f"{inner}ForSequenceClassification", f"{stem}ForSequenceClassification")
                return (*dict.fromkeys(names), self.architecture)
            case _:
                return (self.architecture,)


def _llama(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return _rope(fields, read_rope(fields)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


def _mistral(fields: Fields) -> Facts:
    return _rope(fields, read_rope(fields)) | window_everywhere(fields)


def _qwen2(fields: Fields) -> Facts:
    return _rope(fields, read_rope(fields)) | _qwen_windows(fields) | {"attention_bias": True}


def _qwen3(fields: Fields) -> Facts:
    return _qwen3_attention(fields) | _qwen_windows(fields)


def _qwen3_moe(fields: Fields) -> Facts:
    windows = window_everywhere(fields) if fields.boolean("use_sliding_window", default=False) else {}
    name = fields.given("num_experts", "num_local_experts")
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    step = fields.integer("decoder_sparse_step", 1, 1 << 12, default=1)
    dense = set(fields.integers("mlp_only_layers", 0, 1 << 12))
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    experts = ExpertsSpec(
        num_experts=fields.integer(name, 1, 1 << 16),
        num_active=fields.integer("num_experts_per_tok", 1, 1 << 16),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22),
        normalize=fields.boolean("norm_topk_prob", default=False),
        dense_layers=tuple(sorted(layer for layer in dense if layer < num_layers)),
    )
    return _qwen3_attention(fields) | windows | {"experts": experts}


def _gemma3(fields: Fields) -> Facts:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(name) is not None:
            raise fields.error(name, fields.get(name), "capped scores and logits are not supported")
    if fields.get("use_bidirectional_attention") != "vision" and fields.boolean(
        "use_bidirectional_attention", default=False
    ):
        raise fields.error(
            "use_bidirectional_attention", True, "only attention to earlier tokens is supported"
        )
    rope, local_theta = read_two_ropes(fields, 1_000_000.0, "rope_local_base_freq", 10_000.0)
    bias = fields.boolean("attention_bias", default=False)
    return _rope(fields, rope) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "query_scale": fields.number("query_pre_attn_scalar", 1e-6, 1e9, default=256.0) ** -0.5,
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096),
        "windowed_layers": _gemma3_windows(fields),
        "local_rope_theta": local_theta,
        "norms_per_layer": 4,
        "float32_norms": True,
    }


def _gemma3_windows(fields: Fields) -> tuple[bool, ...]:
    if fields.get("layer_types") is not None:
        return layer_types(fields)
    name, saved = "sliding_window_pattern", "_sliding_window_pattern"
    pattern = fields.integer(name, 1, 1 << 12, default=_GEMMA3_PATTERN)
    # transformers writes the second name beside `layer_types` and never reads it.
    if fields.integer(saved, 1, 1 << 12, default=pattern) != pattern:
        raise fields.error(
            saved, fields.get(saved), f"but {name} is {fields.get(name)} and {pattern} is used; set {name}"
        )
    return windows_by_pattern(pattern, fields.integer("num_hidden_layers", 1, 1 << 12))


def _phi3(fields: Fields) -> Facts:
    rope = read_rope(fields, kinds=("default", "longrope"), outer_original=True)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    default = fields.integer("hidden_size", 1, 1 << 20) // num_heads
    rotary_dim = int(fields.integer("head_dim", 1, 1 << 12, default) * rope.partial_factor)
    if rotary_dim == 0:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "a part of each head must rotate")
    return (
        _rope(fields, rope._replace(partial_factor=1.0))
        | window_everywhere(fields)
        | {"rotary_dim": None if rope.partial_factor == 1.0 else rotary_dim}
    )


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _gemma3,
        activation="gelu_pytorch_tanh",
        tied=True,
        head_dim=256,
        body="Gemma3TextModel",
    ),
    "phi3": Family("Phi3ForCausalLM", _phi3),
}


def windows_by_pattern(pattern: int, num_layers: int) -> tuple[bool, ...]:
    """All layers have a window except every `pattern`th."""
    return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))


def _rope(fields: Fields, rope: Rope) -> Facts:
    if rope.partial_factor != 1.0:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "only 1.0 is supported")
    return {"rope_theta": rope.theta, "rope_scaling": rope.scaling}


def _qwen3_attention(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return _rope(fields, read_rope(fields)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
    }


def window_everywhere(fields: Fields) -> Facts:
    """`sliding_window` for all layers, if it is set."""
    if fields.get("sliding_window") is None:
        return {}
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    return {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS),
        "windowed_layers": (True,) * num_layers,
    }


def _qwen_windows(fields: Fields) -> Facts:
    """Layers from `max_window_layers` on have a window, if windows are enabled."""
    if not fields.boolean("use_sliding_window", default=False) or fields.get("sliding_window") is None:
        return {}
    if fields.get("layer_types") is not None:
        windowed = layer_types(fields)
    else:
        first = fields.integer("max_window_layers", 0, 1 << 12, default=28)
        windowed = tuple(layer >= first for layer in range(fields.integer("num_hidden_layers", 1, 1 << 12)))
    if not any(windowed):
        return {}
    return {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS),
        "windowed_layers": windowed,
    }


def layer_types(fields: Fields) -> tuple[bool, ...]:
    """Which layers have a window, from the field `layer_types`."""
    value = fields.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if not isinstance(value, list) or any(kind not in known for kind in value):
        raise fields.error("layer_types", value, f"expected a list of {' and '.join(known)}")
    return tuple(kind == "sliding_attention" for kind in value)
