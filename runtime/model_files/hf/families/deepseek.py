"""DeepSeek-V2 and V3, Kimi K2 and GLM-4.7-Flash: latent attention, and experts after the first dense layers."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...latent_spec import LatentSpec
from ...layer_form import PRE_NORMS
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts

_MAX_SIZE: Final = 1 << 14


def _deepseek_v2(fields: Fields) -> Facts:
    return (
        _latent_attention(fields, interleaved=True)
        | {"mlp_bias": fields.boolean("mlp_bias", default=False)}
        | _experts(fields, _first_layers(fields, default=0))
    )


def _deepseek_v3(fields: Fields) -> Facts:
    return _latent_attention(fields, interleaved=_interleaved(fields)) | _experts(
        fields, _first_layers(fields, default=3)
    )


def _glm4_moe_lite(fields: Fields) -> Facts:
    return _latent_attention(fields, interleaved=_interleaved(fields)) | _experts(
        fields, _named_layers(fields)
    )


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


def _first_layers(fields: Fields, default: int) -> list[int]:
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


def _experts(fields: Fields, dense_layers: list[int]) -> Facts:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    if len(dense_layers) == num_layers:
        return {}
    raise fields.error(
        "first_k_dense_replace",
        fields.get("first_k_dense_replace"),
        f"the engine computes this architecture with dense layers only, expected {num_layers}",
    )


FAMILIES: Final[dict[str, Family]] = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "kimi_k2": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", _glm4_moe_lite),
}
