"""What GGUF files with layers of Mamba 2 have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import structs

from ...fields import Fields
from ...hf.families.mamba import MAX_TAPS
from ...spec.state_spec import Mamba2Spec, StateSpec
from .family import Facts

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

MAMBA2_NAMES: Final = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
"""Modules of a layer, and their names in a file."""


def kv_heads(fields: Fields, arch: str) -> list[int]:
    """Heads of keys and values of each layer: the same number, or 0 in layers that do not attend."""
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    key = f"{arch}.attention.head_count_kv"
    value = fields.get(key)
    heads = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(heads, list) or len(heads) != num_layers or len({*heads} - {0}) != 1:
        raise fields.error(key, value, f"expected the same number for each of {num_layers} layers, or 0")
    return heads


def mamba2_state(fields: Fields, arch: str, layers: tuple[bool, ...]) -> StateSpec | None:
    """The state layers, of which `layers` has one truth for each layer; None: there are none."""
    if not any(layers):
        return None
    num_heads = fields.integer(f"{arch}.ssm.time_step_rank", 1, 1 << 16)
    key = f"{arch}.ssm.inner_size"
    size = fields.integer(key, num_heads, 1 << 24)
    if size % num_heads:
        raise fields.error(key, size, f"which {num_heads} heads cannot share evenly")
    mamba = Mamba2Spec(
        num_heads=num_heads,
        head_dim=size // num_heads,
        num_groups=fields.integer(f"{arch}.ssm.group_count", 1, 1 << 16),
        state_dim=fields.integer(f"{arch}.ssm.state_size", 1, 1 << 16),
    )
    return StateSpec(
        layers=layers,
        conv_size=mamba.conv_size,
        conv_taps=fields.integer(f"{arch}.ssm.conv_kernel", 2, MAX_TAPS),
        mamba=mamba,
    )


def with_conv_bias(file: GGUFFile, facts: Facts) -> Facts:
    """Whether the convolutions have biases shows in the tensors only."""
    state: StateSpec | None = facts["state"]
    if state is None:
        return facts
    bias = f"blk.{state.layers.index(True)}.ssm_conv1d.bias" in file.tensors
    return facts | {"state": structs.replace(state, conv_bias=bias)}
