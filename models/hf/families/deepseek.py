"""DeepSeek-V2 and V3, Kimi K2 and GLM-4.7-Flash: latent attention, and experts after the first dense layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.experts_spec import ExpertsSpec, Routing
from ...spec.latent_spec import LatentSpec
from ...spec.layer_form import PRE_NORMS
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts

_MAX_SIZE: Final = 1 << 14


def _deepseek_v2(fields: Fields) -> Facts:
    return (
        _latent_attention(fields, interleaved=True)
        | experts_after(fields, first_layers(fields, default=0), _softmax_routing, num_shared=2)
        | _mlp_bias(fields)
    )


def _mlp_bias(fields: Fields) -> Facts:
    bias = fields.boolean("mlp_bias", default=False)
    if bias and len(first_layers(fields, default=0)) < fields.integer("num_hidden_layers", 1, 1 << 12):
        raise fields.error("mlp_bias", True, "only false is supported for a model with experts")
    return {"mlp_bias": bias}


def _deepseek_v3(fields: Fields) -> Facts:
    return (
        _latent_attention(fields, interleaved=_interleaved(fields))
        | experts_after(fields, first_layers(fields, default=3), sigmoid_routing, num_shared=1)
        | further_layers(fields)
    )


def _glm4_moe_lite(fields: Fields) -> Facts:
    routing = partial(sigmoid_routing, num_active=4, num_groups=1, num_active_groups=1, scale=1.8)
    return (
        _latent_attention(fields, interleaved=_interleaved(fields))
        | experts_after(fields, _named_layers(fields), routing, num_shared=1)
        | further_layers(fields)
    )


def further_layers(fields: Fields) -> Facts:
    """Layers of the checkpoint that predict further tokens."""
    name = fields.given("num_nextn_predict_layers", "num_mtp_layers")
    return {"num_mtp_layers": fields.integer(name, 0, 1 << 8, default=1)}


def _interleaved(fields: Fields) -> bool:
    return fields.boolean("rope_interleave", default=True)


def _latent_attention(fields: Fields, *, interleaved: bool) -> Facts:
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    kv_heads = fields.integer("num_key_value_heads", 1, 1 << 12, default=num_heads)
    if kv_heads != num_heads:
        raise fields.error(
            "num_key_value_heads",
            kv_heads,
            f"expected num_attention_heads, {num_heads}: with latent attention all heads read one row per token",
        )
    has_q_latent = fields.get("q_lora_rank") is not None
    latent = LatentSpec(
        q_lora_rank=fields.integer("q_lora_rank", 1, _MAX_SIZE) if has_q_latent else None,
        kv_lora_rank=fields.integer("kv_lora_rank", 1, _MAX_SIZE),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", 1, _MAX_SIZE),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 1, _MAX_SIZE),
        v_head_dim=fields.integer("v_head_dim", 1, _MAX_SIZE),
    )
    rope = read_rope(fields, kinds=("default", "yarn"))
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, rope) | {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.row_size,
        "rotary_dim": latent.qk_rope_head_dim,
        "query_scale": rope.mscale**2 * latent.qk_head_dim**-0.5,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "form": structs.replace(PRE_NORMS, interleaved_rope=interleaved),
    }


def first_layers(fields: Fields, default: int) -> list[int]:
    """The dense layers, which come first."""
    if fields.integer("moe_layer_freq", 1, 1 << 12, default=1) != 1:
        raise fields.error(
            "moe_layer_freq", fields.get("moe_layer_freq"), "only 1 is supported: experts in each layer"
        )
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    first = fields.integer("first_k_dense_replace", 0, 1 << 12, default=default)
    return list(range(min(first, num_layers)))


def _named_layers(fields: Fields) -> list[int]:
    """The dense layers of a file that names the kind of each layer's MLP; without names the first one is dense."""
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (num_layers - 1)
    if not isinstance(kinds, list) or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.error("mlp_layer_types", kinds, "expected a list of dense and sparse")
    if len(kinds) != num_layers:
        raise fields.error("mlp_layer_types", kinds, f"expected one for each of the {num_layers} layers")
    dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    first = fields.integer("first_k_dense_replace", 0, 1 << 12, default=len(dense))
    if dense != list(range(first)):
        raise fields.error(
            "first_k_dense_replace", first, f"but by mlp_layer_types the dense layers are {dense}"
        )
    return dense


def experts_after(
    fields: Fields, dense_layers: list[int], routing: Callable[[Fields], Routing], num_shared: int
) -> Facts:
    """The experts of the other layers, read only if there are any.

    Args:
        num_shared: experts that compute for each token if the file does not say how many; they are stored as one.
    """
    if len(dense_layers) == fields.integer("num_hidden_layers", 1, 1 << 12):
        return {}
    width = fields.integer("moe_intermediate_size", 1, 1 << 22)
    experts = ExpertsSpec(
        num_experts=fields.integer("n_routed_experts", 1, 1 << 16),
        intermediate_size=width,
        routing=routing(fields),
        dense_layers=tuple(dense_layers),
        shared_size=width * fields.integer("n_shared_experts", 0, 1 << 8, default=num_shared),
    )
    return {"experts": experts}


def _softmax_routing(fields: Fields) -> Routing:
    """Of V2."""
    _only(fields, "scoring_func", "softmax")
    if fields.boolean("norm_topk_prob", default=False):
        raise fields.error("norm_topk_prob", True, "only false is supported: shares that are not normalized")
    method = fields.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "supported are: greedy, group_limited_greedy")
    num_groups, num_active_groups = 1, 1
    if method == "group_limited_greedy":
        num_groups = fields.integer("n_group", 1, 1 << 12)
        num_active_groups = fields.integer("topk_group", 1, 1 << 12)
    return Routing(
        num_active=fields.integer("num_experts_per_tok", 1, 1 << 16),
        normalize=False,
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
        float32_logits=True,
    )


def sigmoid_routing(
    fields: Fields,
    *,
    num_active: int = 8,
    num_groups: int = 8,
    num_active_groups: int = 4,
    scale: float = 2.5,
) -> Routing:
    """Of V3, and of GLM with other defaults."""
    _only(fields, "scoring_func", "sigmoid")
    _only(fields, "topk_method", "noaux_tc")
    return Routing(
        num_active=fields.integer("num_experts_per_tok", 1, 1 << 16, default=num_active),
        normalize=fields.boolean("norm_topk_prob", default=True),
        scores="sigmoid",
        has_bias=True,
        num_groups=fields.integer("n_group", 1, 1 << 12, default=num_groups),
        num_active_groups=fields.integer("topk_group", 1, 1 << 12, default=num_active_groups),
        group_best=2,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, default=scale),
        float32_logits=True,
    )


def _only(fields: Fields, name: str, value: str) -> None:
    found = fields.text(name, default=value)
    if found != value:
        raise fields.error(name, found, f"only {value!r} is supported for this architecture")


FAMILIES: Final[dict[str, Family]] = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "kimi_k2": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", _glm4_moe_lite),
}
