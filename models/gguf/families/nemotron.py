"""Nemotron-H: layers of a single block each: Mamba 2, attention, or an MLP without gates, also a mixture of experts."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...fields import Fields
from ...hf.families.nemotron import NEMOTRON_FORM, NEMOTRON_NAMES
from ...spec.experts_spec import ExpertsSpec, Routing
from .family import LAYER_NAMES, Facts, GGUFFamily
from .mamba import MAMBA2_NAMES, kv_heads, mamba2_state, with_conv_bias


def _nemotron_h(fields: Fields, arch: str) -> Facts:
    """A layer with heads of keys and values attends, one with a width is an MLP, the others are of Mamba 2.

    A layer after the last, which predicts further tokens, has both.
    """
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    heads = kv_heads(fields, arch)
    key = f"{arch}.feed_forward_length"
    value = fields.get(key)
    widths = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(widths, list) or len(widths) != len(heads) or len({*widths} - {0}) != 1:
        raise fields.error(key, value, f"expected the same number for each of {len(heads)} layers, or 0")
    num_layers = max(1, len(heads) - further)
    heads, widths = heads[:num_layers], widths[:num_layers]
    if any(count and width for count, width in zip(heads, widths, strict=True)):
        raise fields.error(key, value, "but a layer with attention has no MLP")
    return {
        "num_layers": num_layers,
        "num_mtp_layers": further,
        "num_kv_heads": max(heads),
        "rotary_dim": None,
        "rope_layers": (False,) * len(heads),
        "intermediate_size": max(widths),
        "form": NEMOTRON_FORM,
        "mlp_layers": tuple(width > 0 for width in widths),
        "state": mamba2_state(
            fields, arch, tuple(count == width == 0 for count, width in zip(heads, widths, strict=True))
        ),
    }


def _nemotron_h_moe(fields: Fields, arch: str) -> Facts:
    """All MLPs of such a file are mixtures of experts."""
    key = f"{arch}.moe_latent_size"
    if fields.integer(key, 0, 1 << 20, default=0):
        raise fields.error(key, fields.get(key), "experts of latents are not supported")
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
        names=NEMOTRON_NAMES,
    )
    return _nemotron_h(fields, arch) | {"experts": experts}


_NAMES: Final = {
    **{name: stored for name, stored in LAYER_NAMES.items() if not name.endswith(("layernorm", "gate_proj"))},
    **MAMBA2_NAMES,
    "norm": "attn_norm",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "nemotron_h": GGUFFamily(
        "nemotron_h",
        _nemotron_h,
        _NAMES,
        partial_rotary=True,  # the file has a rotary part, though heads have no rotary
        of_tensors=with_conv_bias,
    ),
    "nemotron_h_moe": GGUFFamily(
        "nemotron_h",
        _nemotron_h_moe,
        _NAMES,
        partial_rotary=True,
        has_experts=True,
        of_tensors=with_conv_bias,
    ),
}
