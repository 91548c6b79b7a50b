"""Nemotron-H: layers of a single block each: Mamba 2, attention, or an MLP without gates, also a mixture of experts."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import Biases, LayerForm, ModuleNames
from ..spec.model_spec import FilesSpec
from ..spec.state_spec import Mamba2Spec, StateSpec
from .deepseek import sigmoid_routing
from .family import GGUF, LAYER_NAMES, Facts, Family
from .gguf_readers import as_list, kv_heads
from .mamba import MAMBA2_NAMES, MAX_TAPS, mamba2_state, time_step_bounds, with_conv_bias

NEMOTRON_FORM: Final = LayerForm(
    norms=("norm",), mlp="plain", mlp_names=("up_proj", "down_proj"), names=ModuleNames(mtp="mtp.")
)

NEMOTRON_NAMES: Final = ExpertNames(gate_up_stack="experts.up_proj")

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_OF_LETTER: Final = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_OLD_NAMES: Final = {"mamba": _MAMBA, "attention": _ATTENTION}
_ONLY: Final = {
    "attention_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "residual_in_fp32": False,
    "sliding_window": None,
    "n_shared_experts": 1,
}
"""Fields with the only value that is supported; they may be missing."""


def _nemotron_h(fields: Fields) -> Facts:
    """Without rotary. Time steps have the bounds of `time_step_limit`.

    transformers takes `time_step_min`, by which weights are initialized, for a lower bound in prompts. Its decodes have
    none, as llama.cpp has none.
    """
    for name, only in _ONLY.items():
        if fields.get(name) not in (None, only):
            rule = f"only {'null' if only is None else str(only).lower()} is supported"
            raise fields.error(name, fields.get(name), rule)
    kinds = _kinds(fields)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12, default=32)
    return {
        "num_layers": len(kinds),
        "num_kv_heads": fields.integer(
            "num_key_value_heads", 1, num_heads, num_heads if "num_key_value_heads" in fields else 8
        ),
        "rope_theta": 10000.0,
        "rope_layers": (False,) * len(kinds),
        "biases": Biases(mlp=fields.boolean("mlp_bias", default=False)),
        "form": structs.replace(NEMOTRON_FORM, mlp_layers=tuple(kind in (_MLP, _EXPERTS) for kind in kinds)),
        "experts": _experts(fields, kinds) if _EXPERTS in kinds else None,
        "state": _mamba2(fields, tuple(kind == _MAMBA for kind in kinds)),
    }


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer, from a list or from a pattern of letters."""
    name = fields.given("layers_block_type", "layer_types")
    kinds = fields.get(name)
    if kinds is None:
        name = "hybrid_override_pattern"
        kinds = fields.get(name)
    if isinstance(kinds, str):
        found = [_OF_LETTER.get(letter, letter) for letter in kinds]
    elif isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        found = [_OLD_NAMES.get(kind) or kind for kind in kinds]
    else:
        raise fields.error(name, kinds, "expected the kinds of layers, or a pattern of M, E, * and -")
    if unknown := set(found) - {*_OF_LETTER.values()}:
        raise fields.error(name, kinds, f"{min(unknown)!r} is no known kind of layer")
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12, default=len(found))
    if num_layers != len(found):
        raise fields.error("num_hidden_layers", num_layers, f"but {name} has {len(found)} layers")
    return found


def _experts(fields: Fields, kinds: list[str]) -> ExpertsSpec:
    """Experts with DeepSeek-V3's routing; experts and the shared one have no gates."""
    if fields.boolean("mlp_bias", default=False):
        raise fields.error("mlp_bias", True, "only false is supported for a model with experts")
    return ExpertsSpec(
        num_experts=fields.integer("n_routed_experts", 1, 1 << 16, default=8),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22, default=7688),
        routing=sigmoid_routing(fields, num_active=2, num_groups=1, num_active_groups=1, scale=1.0),
        dense_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _MLP),
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 1, 1 << 22, default=7688),
        gated=False,
        latent_size=fields.integer("moe_latent_size", 0, 1 << 20, default=0),
        names=NEMOTRON_NAMES,
    )


def _mamba2(fields: Fields, layers: tuple[bool, ...]) -> StateSpec | None:
    bias = fields.boolean("use_bias", default=False)
    if fields.boolean("mamba_proj_bias", default=False) and not bias:
        raise fields.error(
            "mamba_proj_bias", True, "but use_bias, which decides, is false; remove one of them"
        )
    least, most = time_step_bounds(fields, "time_step_limit")
    mamba = Mamba2Spec(
        num_heads=fields.integer("mamba_num_heads", 1, 1 << 16, default=128),
        head_dim=fields.integer("mamba_head_dim", 1, 1 << 16, default=64),
        num_groups=fields.integer("n_groups", 1, 1 << 16, default=8),
        state_dim=fields.integer("ssm_state_size", 1, 1 << 16, default=128),
        projection_bias=bias,
        least_step=least,
        most_step=most,
    )
    state = StateSpec(
        layers=layers,
        conv_size=mamba.conv_size,
        conv_taps=fields.integer("conv_kernel", 2, MAX_TAPS, default=4),
        conv_bias=fields.boolean("use_conv_bias", default=True),
        mamba=mamba,
    )
    return state if any(layers) else None


def _nemotron_h_gguf(fields: Fields, arch: str) -> Facts:
    """A layer with heads of keys and values attends, one with a width is an MLP, the others are of Mamba 2.

    A layer after the last, which predicts further tokens, has both.
    """
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    heads = kv_heads(fields, arch)
    key = f"{arch}.feed_forward_length"
    value = fields.get(key)
    widths = as_list(value)
    if not isinstance(widths, list) or len(widths) != len(heads) or len({*widths} - {0}) != 1:
        raise fields.error(key, value, f"expected the same number for each of {len(heads)} layers, or 0")
    num_layers = max(1, len(heads) - further)
    heads, widths = heads[:num_layers], widths[:num_layers]
    if any(count and width for count, width in zip(heads, widths, strict=True)):
        raise fields.error(key, value, "but a layer with attention has no MLP")
    return {
        "num_layers": num_layers,
        "files": FilesSpec(num_mtp_layers=further),
        "num_kv_heads": max(heads),
        "rotary_dim": None,
        "rope_layers": (False,) * len(heads),
        "intermediate_size": max(widths),
        "form": structs.replace(NEMOTRON_FORM, mlp_layers=tuple(width > 0 for width in widths)),
        "state": mamba2_state(
            fields, arch, tuple(count == width == 0 for count, width in zip(heads, widths, strict=True))
        ),
    }


def _nemotron_h_moe(fields: Fields, arch: str) -> Facts:
    """All MLPs of such a file are mixtures of experts."""
    key = f"{arch}.expert_shared_count"
    if fields.integer(key, 1, 1 << 16, default=1) != 1:
        raise fields.error(key, fields.get(key), "only 1 is supported")
    shared = f"{arch}.expert_shared_feed_forward_length"
    experts = ExpertsSpec(
        num_experts=fields.integer(f"{arch}.expert_count", 1, 1 << 16),
        intermediate_size=fields.integer(f"{arch}.expert_feed_forward_length", 1, 1 << 22),
        routing=Routing(
            num_active=fields.integer(f"{arch}.expert_used_count", 1, 1 << 16),
            normalize=fields.boolean(f"{arch}.expert_weights_norm", default=True),
            scores="sigmoid",
            has_bias=True,
            num_groups=fields.integer(f"{arch}.expert_group_count", 1, 1 << 12, default=1),
            num_active_groups=fields.integer(f"{arch}.expert_group_used_count", 1, 1 << 12, default=1),
            group_best=2,
            scale=fields.number(f"{arch}.expert_weights_scale", 1e-6, 1e6, default=1.0),
        ),
        shared_size=fields.integer(shared, 1, 1 << 22),
        gated=False,
        latent_size=fields.integer(f"{arch}.moe_latent_size", 0, 1 << 20, default=0),
        names=NEMOTRON_NAMES,
    )
    return _nemotron_h_gguf(fields, arch) | {"experts": experts}


_NAMES: Final = {
    **{name: stored for name, stored in LAYER_NAMES.items() if not name.endswith(("layernorm", "gate_proj"))},
    **MAMBA2_NAMES,
    "norm": "attn_norm",
}


FAMILIES: Final = (
    Family(
        "nemotron_h",
        structure="single_block",
        published="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano, Super, Ultra",
        architecture="NemotronHForCausalLM",
        read=_nemotron_h,
        head_dim=128,
        norm_eps="layer_norm_epsilon",
        renamed={
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_dt_limit": "time_step_limit",
            "attention_head_dim": "head_dim",
        },
        gguf={
            "nemotron_h": GGUF(_nemotron_h_gguf, _NAMES, partial_rotary=True, of_tensors=with_conv_bias),
            "nemotron_h_moe": GGUF(
                _nemotron_h_moe, _NAMES, partial_rotary=True, has_experts=True, of_tensors=with_conv_bias
            ),
        },
    ),
)
