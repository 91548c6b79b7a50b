"""Fields and keys of models with layers of Mamba 2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from msgspec import structs

from ..fields import Fields
from ..spec.state_spec import Mamba2Spec, StateSpec
from .family import Facts

if TYPE_CHECKING:
    from ..gguf.gguf_file import GGUFFile

MAX_TAPS: Final = 64
"""Of the convolution, in the kernels."""
_MOST_STEP: Final = 1e9
"""A larger bound is none."""


def time_step_bounds(fields: Fields, name: str) -> tuple[float, float | None]:
    """The bounds of time steps, from a list of two numbers; None: there is no upper one.

    transformers applies them to prompts only, its decodes have none: bounds that matter would make two models of one.
    The engine applies them to all tokens, so that a text does not depend on how it is divided.
    """
    value = fields.get(name)
    if value is None:
        return 0.0, None
    numbers = [_number(one) for one in value] if isinstance(value, list) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= min(numbers[1], _MOST_STEP):  # false for NaN
        raise fields.error(name, value, "expected two numbers, the least and the largest time step")
    least, most = numbers
    return least, None if most > _MOST_STEP else most


def _number(value: object) -> float:
    """NaN if it is none. transformers writes an infinite number as an object with its name."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(min(value, 2 * _MOST_STEP))


MAMBA2_NAMES: Final = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
"""Modules of a layer, and their names in a file."""


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
