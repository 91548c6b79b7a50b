"""Nemotron-H: layers of a single block each, which is one of Mamba 2, of attention, or an MLP without a gate."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...fields import Fields
from ...hf.families.nemotron import NEMOTRON_FORM
from .family import LAYER_NAMES, Facts, GGUFFamily
from .mamba import MAMBA2_NAMES, kv_heads, mamba2_state, with_conv_bias


def _nemotron_h(fields: Fields, arch: str) -> Facts:
    """A layer with heads of keys and values attends, one with a width is an MLP, the others are of Mamba 2."""
    heads = kv_heads(fields, arch)
    key = f"{arch}.feed_forward_length"
    value = fields.get(key)
    widths = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(widths, list) or len(widths) != len(heads) or len({*widths} - {0}) != 1:
        raise fields.error(key, value, f"expected the same number for each of {len(heads)} layers, or 0")
    if any(count and width for count, width in zip(heads, widths, strict=True)):
        raise fields.error(key, value, "but a layer with attention has no MLP")
    return {
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


FAMILIES: Final[dict[str, GGUFFamily]] = {
    "nemotron_h": GGUFFamily(
        "nemotron_h",
        _nemotron_h,
        {**LAYER_NAMES, **MAMBA2_NAMES, "norm": "attn_norm"},
        partial_rotary=True,  # the file has a rotary part, though heads have no rotary
        of_tensors=with_conv_bias,
    ),
}
