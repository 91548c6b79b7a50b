"""DeepSeek-MoE, V2 to V3.2, Kimi K2, GLM-4.7-Flash, GLM-5 and MiniCPM3: latent attention, experts after dense layers.

GGUF has one architecture for all. Its files from before May 2025 name the heads' sizes `key_length` and `value_length`;
in newer ones these are the sizes of a row of the KV pool, and those of heads end with `_mla`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import (
    PRE_NORMS,
    AttentionForm,
    Biases,
    IndexSpec,
    LatentSpec,
    LayerHeads,
    RopeScaling,
)
from ..spec.model_spec import FilesSpec
from ..spec.mtp_spec import mtp_after
from ..spec.streams_spec import StreamsSpec
from .family import GGUF, LAYER_NAMES, Facts, Family
from .gguf_readers import as_list, mixture_of, yarn_scaling
from .hf_readers import rope_facts
from .hf_rope import read_rope

_MAX_SIZE: Final = 1 << 14
_LONGROPE: Final = ("default", "yarn", "longrope")


def _deepseek_moe(fields: Fields) -> Facts:
    """Llama's attention; also in DeepSeek-VL2-tiny and DeepSeek-OCR, which have the type deepseek_v2."""
    bias = fields.boolean("attention_bias", default=False)
    facts = rope_facts(fields, read_rope(fields)) | {"biases": Biases(qkv=bias, attention_out=bias)}
    dense = first_layers(fields, default=0)
    return facts | experts_after(fields, dense, _softmax_routing, num_shared=0)


def _deepseek_v2(fields: Fields) -> Facts:
    if not fields.boolean("use_mla", default=True):
        return _deepseek_moe(fields)
    facts = _latent_attention(fields, interleaved=True)
    facts |= experts_after(fields, first_layers(fields, default=0), _softmax_routing, num_shared=2)
    return facts | {"biases": structs.replace(facts["biases"], mlp=_mlp_bias(fields))}


def _mlp_bias(fields: Fields) -> bool:
    bias = fields.boolean("mlp_bias", default=False)
    if bias and len(first_layers(fields, default=0)) < fields.integer("num_hidden_layers", 1, 1 << 12):
        raise fields.error("mlp_bias", True, "only false is supported for a model with experts")
    return bias


def _deepseek_v3(fields: Fields) -> Facts:
    return (
        _latent_attention(fields, interleaved=_interleaved(fields))
        | experts_after(fields, first_layers(fields, default=3), sigmoid_routing, num_shared=1)
        | with_mtp(fields)
    )


def _sparse(fields: Fields, routing: Callable[[Fields], Routing], *, interleaved: bool) -> Facts:
    """DeepSeek-V3.2 and GLM-5: latent attention with an indexer, which may have other rotary pairs."""
    facts = _latent_attention(fields, interleaved=_interleaved(fields))
    latent: LatentSpec = facts["latent"]
    if latent.q_lora_rank is None:
        raise fields.error("q_lora_rank", None, "the indexer needs the latents of queries")
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    shared = _shared_indexers(fields, num_layers)
    index = IndexSpec(
        num_heads=fields.integer("index_n_heads", 1, 1 << 12, default=64),
        head_dim=fields.integer("index_head_dim", latent.qk_rope_head_dim, _MAX_SIZE, default=128),
        top_k=fields.integer("index_topk", 1, 1 << 24, default=2048),
        interleaved_rope=fields.boolean("indexer_rope_interleave", default=interleaved),
        shared_layers=tuple(shared) if any(shared) else (),
    )
    facts |= _with_index(latent, index)
    has_names = fields.get("mlp_layer_types") is not None
    dense = _named_layers(fields) if has_names else first_layers(fields, default=3)
    return facts | experts_after(fields, dense, routing, num_shared=1) | further_layers(fields)


def _with_index(latent: LatentSpec, index: IndexSpec) -> Facts:
    """The facts that an indexer changes: layers without one of their own have shorter rows."""
    latent = structs.replace(latent, index=index)
    facts: Facts = {"latent": latent, "head_dim": latent.row_size}
    if index.shared_layers:
        sizes = [latent.key_size if is_shared else latent.row_size for is_shared in index.shared_layers]
        heads = tuple(LayerHeads(head_dim=size, num_kv_heads=1) for size in sizes)
        facts["streams"] = StreamsSpec(layer_heads=heads)
    return facts


def _shared_indexers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers attend to the tokens that an earlier one chose: by name, or one in so many chooses."""
    kinds = fields.get("indexer_types")
    if kinds is None and fields.get("index_topk_pattern") is not None:
        pattern = fields.get("index_topk_pattern")
        letters = pattern if isinstance(pattern, str | list) else ()
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in letters]
    if kinds is None:
        every = fields.integer("index_topk_freq", 0, 1 << 12, default=1)
        first = fields.integer("index_skip_topk_offset", 0, 1 << 12, default=2)
        return [max(layer - first + 1, 0) % max(every, 1) != 0 for layer in range(num_layers)]
    if not isinstance(kinds, list) or any(kind not in ("full", "shared") for kind in kinds):
        raise fields.error("indexer_types", kinds, "expected a list of full and shared")
    if len(kinds) != num_layers or kinds[0] != "full":
        raise fields.error(
            "indexer_types", kinds, f"expected one for each of the {num_layers} layers, full first"
        )
    return [kind == "shared" for kind in kinds]


def _deepseek_v32(fields: Fields) -> Facts:
    return _sparse(fields, sigmoid_routing, interleaved=False)


def _glm_moe_dsa(fields: Fields) -> Facts:
    return _sparse(fields, partial(sigmoid_routing, num_groups=1, num_active_groups=1), interleaved=True)


def _glm4_moe_lite(fields: Fields) -> Facts:
    routing = partial(sigmoid_routing, num_active=4, num_groups=1, num_active_groups=1, scale=1.8)
    return (
        _latent_attention(fields, interleaved=_interleaved(fields))
        | experts_after(fields, _named_layers(fields), routing, num_shared=1)
        | with_mtp(fields)
    )


def further_layers(fields: Fields) -> Facts:
    """Layers of the checkpoint that predict further tokens."""
    name = fields.given("num_nextn_predict_layers", "num_mtp_layers")
    further = fields.integer(name, 0, 1 << 8, default=1)
    return {"files": FilesSpec(num_mtp_layers=further)}


def with_mtp(fields: Fields) -> Facts:
    """The same, of which the first is read."""
    facts = further_layers(fields)
    has_one = facts["files"].num_mtp_layers > 0
    return facts | {"mtp": mtp_after(fields.integer("num_hidden_layers", 1, 1 << 12)) if has_one else None}


def _interleaved(fields: Fields) -> bool:
    return fields.boolean("rope_interleave", default=True)


def _minicpm3(fields: Fields) -> Facts:
    """Scaled embeddings, blocks and logits; null is no scaling, and not the default of a file without the field.

    The scores have no factor of the scaling of rope.
    """
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    size = fields.integer("hidden_size", 1, 1 << 20)
    value_dim = size // fields.integer("num_attention_heads", 1, 1 << 12)
    depth = math.sqrt(num_layers) if "scale_depth" in fields else 1.4
    base = size if "dim_model_base" in fields else 256
    facts = _latent_attention(fields, interleaved=False, kinds=_LONGROPE, value_dim=value_dim)
    form = structs.replace(
        facts["form"],
        embedding_scale=fields.number("scale_emb", 1e-6, 1e6, default=12.0),
        residual_scale=fields.number("scale_depth", 1e-6, 1e6, default=depth) / math.sqrt(num_layers),
        logits_scale=fields.integer("dim_model_base", 1, 1 << 20, default=base) / size,
    )
    return facts | {"form": form}


def _latent_attention(
    fields: Fields,
    *,
    interleaved: bool,
    kinds: tuple[str, ...] = ("default", "yarn"),
    value_dim: int | None = None,
) -> Facts:
    """`kinds`: of rope; `value_dim`: the default of `v_head_dim`, None: it is required."""
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
        v_head_dim=fields.integer("v_head_dim", 1, _MAX_SIZE, default=value_dim),
    )
    rope = read_rope(fields, kinds=kinds)
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, rope) | {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.row_size,
        "rotary_dim": latent.qk_rope_head_dim,
        "attention": AttentionForm(query_scale=rope.mscale**2 * latent.qk_head_dim**-0.5),
        "biases": Biases(qkv=bias, attention_out=bias),
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
    if dense != list(range(min(first, num_layers))):
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
    """Routing of V2."""
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
    """Routing of V3, and of GLM with other defaults."""
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


_MAX_SIZE_GGUF: Final = 1 << 14
_SOFTMAX, SIGMOID = 1, 2
_GLM_5_2_CONTEXT: Final = 1 << 20


def _deepseek(fields: Fields, arch: str) -> Facts:
    return experts_after_gguf(fields, arch)


def _deepseek2(fields: Fields, arch: str) -> Facts:
    """Layers that predict further tokens count as blocks of the file; llama.cpp's converter leaves them out."""
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    num_layers = fields.integer(f"{arch}.block_count", further + 1, 1 << 12) - further
    heads = f"{arch}.attention"
    end = "" if fields.get(f"{heads}.key_length_mla") is None else "_mla"
    rotary_dim = fields.integer(f"{arch}.rope.dimension_count", 1, _MAX_SIZE_GGUF)
    q_rank = fields.integer(f"{heads}.q_lora_rank", 0, _MAX_SIZE_GGUF, default=0)
    latent = LatentSpec(
        q_lora_rank=q_rank or None,
        kv_lora_rank=fields.integer(f"{heads}.kv_lora_rank", 1, _MAX_SIZE_GGUF),
        qk_nope_head_dim=fields.integer(f"{heads}.key_length{end}", rotary_dim + 1, 2 * _MAX_SIZE_GGUF)
        - rotary_dim,
        qk_rope_head_dim=rotary_dim,
        v_head_dim=fields.integer(f"{heads}.value_length{end}", 1, _MAX_SIZE_GGUF),
    )
    scaling, mscale = _rope(fields, arch)
    return {
        "num_layers": num_layers,
        "files": FilesSpec(num_mtp_layers=further),
        "mtp": mtp_after(num_layers) if further else None,
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.row_size,
        "rotary_dim": rotary_dim,
        "rope_scaling": scaling,
        "attention": AttentionForm(query_scale=mscale**2 * latent.qk_head_dim**-0.5),
        "form": structs.replace(PRE_NORMS, interleaved_rope=True),
        **experts_after_gguf(fields, arch),
    }


def _glm_dsa(fields: Fields, arch: str) -> Facts:
    """As of `_deepseek2`; the layer that predicts further tokens has an indexer, and is not read."""
    facts = _deepseek2(fields, arch) | {"mtp": None}
    heads = f"{arch}.attention.indexer"
    num_layers: int = facts["num_layers"]
    shared = _shared_indexers_gguf(fields, arch, num_layers)
    index = IndexSpec(
        num_heads=fields.integer(f"{heads}.head_count", 1, 1 << 12),
        head_dim=fields.integer(f"{heads}.key_length", facts["rotary_dim"], _MAX_SIZE_GGUF),
        top_k=fields.integer(f"{heads}.top_k", 1, 1 << 24),
        interleaved_rope=True,
        shared_layers=shared if any(shared) else (),
    )
    return facts | {
        **_with_index(facts["latent"], index),
        **experts_after_gguf(fields, arch, SIGMOID),
    }


def _shared_indexers_gguf(fields: Fields, arch: str, num_layers: int) -> tuple[bool, ...]:
    """The layers without an indexer of their own; older files of GLM-5.2, with its length, do not say which."""
    key = f"{arch}.attention.indexer.types"
    kinds = as_list(fields.get(key))
    if kinds is None:
        is_5_2 = fields.integer(f"{arch}.context_length", 1, 1 << 30) >= _GLM_5_2_CONTEXT
        return tuple(is_5_2 and max(layer - 2, 0) % 4 != 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) < num_layers or not kinds[0]:
        raise fields.error(key, kinds, f"expected a truth value for each of {num_layers} layers, true first")
    return tuple(not kind for kind in kinds[:num_layers])


def experts_after_gguf(fields: Fields, arch: str, default: int = _SOFTMAX) -> Facts:
    """Experts after the first dense layers; `default`: the kind of scores of older files, which do not name it."""
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) == 0:
        return {}
    gating = fields.integer(f"{arch}.expert_gating_func", 0, 1 << 8, default=0)
    if gating not in (_SOFTMAX, SIGMOID, 0):
        raise fields.error(
            f"{arch}.expert_gating_func", gating, f"supported are: {_SOFTMAX} (softmax), {SIGMOID} (sigmoid)"
        )
    is_sigmoid = (gating or default) == SIGMOID
    num_groups = fields.integer(f"{arch}.expert_group_count", 0, 1 << 12, default=0) or 1
    experts = mixture_of(fields, arch, ExpertNames())
    dense = fields.integer(f"{arch}.leading_dense_block_count", 0, 1 << 12, default=0)
    routing = structs.replace(
        experts.routing,
        normalize=fields.boolean(f"{arch}.expert_weights_norm", default=False),
        scores="sigmoid" if is_sigmoid else "softmax",
        has_bias=is_sigmoid,
        num_groups=num_groups,
        num_active_groups=fields.integer(f"{arch}.expert_group_used_count", 0, 1 << 12, default=0)
        or num_groups,
        group_best=2 if is_sigmoid else 1,
        scale=fields.number(f"{arch}.expert_weights_scale", 0.0, 1e6, default=1.0) or 1.0,
        float32_logits=True,
    )
    shared = fields.integer(f"{arch}.expert_shared_count", 0, 1 << 8, default=0)
    return {
        "experts": structs.replace(
            experts,
            routing=routing,
            dense_layers=tuple(range(dense)),
            shared_size=shared * experts.intermediate_size,
        )
    }


def _rope(fields: Fields, arch: str) -> tuple[RopeScaling, float]:
    """The scaling, and yarn's factor of whole queries and keys: llama.cpp cancels the one of cos and sin instead."""
    key = f"{arch}.rope.scaling"
    kind = fields.text(f"{key}.type", default="none")
    if kind == "none":
        return RopeScaling(), 1.0
    if kind != "yarn":
        raise fields.error(f"{key}.type", kind, "which is not supported; supported are: none, yarn")
    scaling = structs.replace(yarn_scaling(fields, arch), attention_factor=1.0)
    multiplier = fields.number(f"{key}.yarn_log_multiplier", 0.0, 1e3, default=0.0)
    return scaling, 1.0 + multiplier * math.log(scaling.factor)


_NAMES: Final = {
    **LAYER_NAMES,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_INDEXER_NAMES: Final = {
    **_NAMES,
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}


FAMILIES: Final = (
    Family(
        "deepseek",
        structure="llama",
        published="DeepSeek-MoE 16B",
        architecture="DeepseekForCausalLM",
        read=_deepseek_moe,
        gguf={"deepseek": GGUF(_deepseek, has_experts=True, neighbors=True)},
    ),
    Family(
        "deepseek_v2",
        structure="latent",
        published="DeepSeek-V2, V2-Lite, V2.5",
        architecture="DeepseekV2ForCausalLM",
        read=_deepseek_v2,
        gguf={"deepseek2": GGUF(_deepseek2, _NAMES, has_experts=True, has_own_heads=True)},
    ),
    Family(
        "deepseek_v3",
        structure="latent",
        published="DeepSeek-V3, R1",
        architecture="DeepseekV3ForCausalLM",
        read=_deepseek_v3,
        stored_as="deepseek2",
    ),
    Family(
        "kimi_k2",
        structure="latent",
        published="Kimi K2",
        architecture="DeepseekV3ForCausalLM",
        read=_deepseek_v3,
        stored_as="deepseek2",
    ),
    Family(
        "deepseek_v32",
        structure="latent",
        published="DeepSeek-V3.2",
        architecture="DeepseekV32ForCausalLM",
        read=_deepseek_v32,
    ),
    Family(
        "glm_moe_dsa",
        structure="latent",
        published="GLM-5, 5.1, 5.2",
        architecture="GlmMoeDsaForCausalLM",
        read=_glm_moe_dsa,
        gguf={"glm-dsa": GGUF(_glm_dsa, _INDEXER_NAMES, has_experts=True, has_own_heads=True)},
    ),
    Family(
        "minicpm3",
        structure="latent",
        published="MiniCPM3 4B",
        architecture="MiniCPM3ForCausalLM",
        read=_minicpm3,
        tied=True,
    ),
    Family(
        "glm4_moe_lite",
        structure="latent",
        published="GLM-4.7-Flash",
        architecture="Glm4MoeLiteForCausalLM",
        read=_glm4_moe_lite,
        stored_as="deepseek2",
    ),
)
