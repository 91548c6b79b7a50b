"""Nemotron-H: layers of a single block each: Mamba 2, attention, or an MLP without gates, also a mixture of experts."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...spec.experts_spec import ExpertNames, ExpertsSpec
from ...spec.layer_form import LayerForm, ModuleNames
from ...spec.state_spec import Mamba2Spec, StateSpec
from .deepseek import sigmoid_routing
from .family import Facts, Family
from .mamba import MAX_TAPS, time_step_bounds

NEMOTRON_FORM: Final = LayerForm(
    norms=("norm",),
    mlp="plain",
    mlp_names=("up_proj", "down_proj"),
    names=ModuleNames(mtp="mtp."),
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
    "moe_latent_size": None,
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
    quantization = fields.get("quantization_config")
    if quantization is not None:
        rule = "which is not read for this architecture; give the folder in bfloat16, or a GGUF file"
        raise fields.error("quantization_config", quantization, rule)
    kinds = _kinds(fields)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12, default=32)
    return {
        "num_layers": len(kinds),
        "num_kv_heads": fields.integer(
            "num_key_value_heads", 1, num_heads, num_heads if "num_key_value_heads" in fields else 8
        ),
        "rope_theta": 10000.0,
        "rope_layers": (False,) * len(kinds),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "form": NEMOTRON_FORM,
        "mlp_layers": tuple(kind in (_MLP, _EXPERTS) for kind in kinds),
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
    """Of DeepSeek-V3's routing; experts and the shared one have no gates."""
    if fields.boolean("mlp_bias", default=False):
        raise fields.error("mlp_bias", True, "only false is supported for a model with experts")
    return ExpertsSpec(
        num_experts=fields.integer("n_routed_experts", 1, 1 << 16, default=8),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22, default=7688),
        routing=sigmoid_routing(fields, num_active=2, num_groups=1, num_active_groups=1, scale=1.0),
        dense_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _MLP),
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 1, 1 << 22, default=7688),
        gated=False,
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


FAMILIES: Final[dict[str, Family]] = {
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        _nemotron_h,
        head_dim=128,
        norm_eps="layer_norm_epsilon",
        renamed={
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_dt_limit": "time_step_limit",
            "attention_head_dim": "head_dim",
        },
    ),
}
