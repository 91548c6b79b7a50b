"""Nemotron-H: layers of a single block each, which is one of Mamba 2, of attention, or an MLP without a gate."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...layer_form import LayerForm, ModuleNames
from ...state_spec import Mamba2Spec, StateSpec
from .family import Facts, Family
from .mamba import MAX_TAPS, time_step_bounds

NEMOTRON_FORM: Final = LayerForm(
    norms=("norm",),
    mlp="plain",
    mlp_names=("up_proj", "down_proj"),
    names=ModuleNames(mtp="mtp."),
)

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_OF_LETTER: Final = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_OLD_NAMES: Final = {"mamba": _MAMBA, "attention": _ATTENTION}
_ONLY: Final = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "residual_in_fp32": False,
    "sliding_window": None,
    "quantization_config": None,
}
"""Fields with the only value that is supported; they may be missing."""


def _nemotron_h(fields: Fields) -> Facts:
    """Without rotary. Time steps have the bounds of `time_step_limit`.

    transformers takes `time_step_min`, by which weights are initialized, for a lower bound in prompts; in decodes, and
    in the code that the models were trained with, there is none.
    """
    for name, only in _ONLY.items():
        if fields.get(name) not in (None, only):
            rule = "which is not supported" if only is None else f"only {str(only).lower()} is supported"
            raise fields.error(name, fields.get(name), rule)
    kinds = _kinds(fields)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12, default=32)
    bias = fields.boolean("attention_bias", default=False)
    return {
        "num_layers": len(kinds),
        "num_kv_heads": fields.integer(
            "num_key_value_heads", 1, num_heads, num_heads if "num_key_value_heads" in fields else 8
        ),
        "rope_theta": 10000.0,
        "rope_layers": (False,) * len(kinds),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "form": NEMOTRON_FORM,
        "mlp_layers": tuple(kind == _MLP for kind in kinds),
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
        found = [_OLD_NAMES.get(kind, kind) for kind in kinds]
    else:
        raise fields.error(name, kinds, "expected the kinds of layers, or a pattern of M, * and -")
    if _EXPERTS in found:
        raise fields.error(name, kinds, "layers with experts are not supported; use a model without them")
    if unknown := set(found) - {_MAMBA, _ATTENTION, _MLP}:
        raise fields.error(name, kinds, f"{min(unknown)!r} is no known kind of layer")
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12, default=len(found))
    if num_layers != len(found):
        raise fields.error("num_hidden_layers", num_layers, f"but {name} has {len(found)} layers")
    return found


def _mamba2(fields: Fields, layers: tuple[bool, ...]) -> StateSpec | None:
    bias = fields.boolean("use_bias", default=False)
    if fields.boolean("mamba_proj_bias", default=bias) != bias:
        raise fields.error("mamba_proj_bias", not bias, f"but use_bias is {str(bias).lower()}; remove one of them")
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
