"""Rotary position embedding in config.json, in the formats of transformers 4 and 5.

Transformers 4 writes `rope_theta` and `rope_scaling`. Transformers 5 writes `rope_parameters` with both; if kinds of
layers differ, it holds one such object per kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from ..fields import Fields
from ..model_spec import RopeScaling

MAX_POSITIONS: Final = 1 << 30

_KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope")
_OLD_NAMES: Final = {"su": "longrope"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Rope(NamedTuple):
    """The rotary facts for `ModelSpec`."""

    theta: float
    scaling: RopeScaling
    partial_factor: float


def read_rope(fields: Fields, default_theta: float = 10000.0) -> Rope:
    """Base frequency and scaling of a model with the same rope in all layers.

    Raises:
        ConfigError: a field is wrong, or the scaling is not implemented.
    """
    name, values = _parameters(fields)
    if any(isinstance(value, Mapping) for value in values.values()):
        raise fields.error(name, values, "a different rope for some of the layers is not supported")
    return _read(fields, Fields(fields.path, values, prefix=f"{name}."), default_theta)


def read_two_ropes(
    fields: Fields, default_theta: float, local_field: str, default_local_theta: float
) -> tuple[Rope, float]:
    """The rope of the full-attention layers, and the base frequency of the windowed layers.

    Raises:
        ConfigError: see `read_rope`.
    """
    name, values = _parameters(fields)
    if _FULL not in values and _SLIDING not in values:
        return read_rope(fields, default_theta), fields.number(
            local_field, 1.0, 1e15, default=default_local_theta
        )
    ropes = []
    for kind, theta in ((_FULL, default_theta), (_SLIDING, default_local_theta)):
        inner = values.get(kind) or {}
        if not isinstance(inner, Mapping):
            raise fields.error(f"{name}.{kind}", inner, "expected an object or null")
        ropes.append(_read(fields, Fields(fields.path, inner, prefix=f"{name}.{kind}."), theta))
    if ropes[1].scaling != RopeScaling():
        raise fields.error(f"{name}.{_SLIDING}", values[_SLIDING], "windowed layers must not be scaled")
    return ropes[0], ropes[1].theta


def _parameters(fields: Fields) -> tuple[str, Mapping[str, object]]:
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(name)
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise fields.error(name, values, "expected an object or null")
    return name, values


def _read(fields: Fields, rope: Fields, default_theta: float) -> Rope:
    """One rope; fields missing in its own object are read from the top level.

    Llama 1 and 2 were published without a base; 10000 is the one they were trained with.
    """
    theta = rope.number("rope_theta", 1.0, 1e15, fields.number("rope_theta", 1.0, 1e15, default_theta))
    partial = rope.number(
        "partial_rotary_factor", 0.0, 1.0, fields.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    )
    return Rope(theta, _scaling(fields, rope), partial)


def _scaling(fields: Fields, rope: Fields) -> RopeScaling:
    kind_field = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.text(kind_field, default="default")
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in _KINDS:
        raise rope.error(kind_field, kind, f"which is not supported; supported are: {', '.join(_KINDS)}")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor", 1.0, 1e6))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor", 1.0, 1e6),
            low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
            high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
            original_max_position=rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS),
        )
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    # Phi-3 has it at the top level, which has precedence in transformers.
    holder = fields if fields.get("original_max_position_embeddings") is not None else rope
    original = holder.integer("original_max_position_embeddings", 2, MAX_POSITIONS, default=max_position)
    # At most 1 means no scaling; longrope files omit it, and the ratio of the lengths is used.
    factor = rope.number("factor", 1e-3, 1e6, default=max_position / original)
    if kind == "yarn":
        return _yarn(rope, factor, original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.number("attention_factor", 1e-6, 1e6, default=default),
        short_factor=_factors(rope, "short_factor"),
        long_factor=_factors(rope, "long_factor"),
    )


def _yarn(rope: Fields, factor: float, original: int) -> RopeScaling:
    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = sharpness(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = sharpness(rope.number("mscale", 0.0, 1e3)) / sharpness(
            rope.number("mscale_all_dim", 0.0, 1e3)
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=rope.number("beta_slow", 1e-6, 1e6, default=1.0),
        truncate=rope.boolean("truncate", default=True),
        attention_factor=rope.number("attention_factor", 1e-6, 1e6, default=default),
    )


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    value = rope.get(name)
    if not isinstance(value, list) or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf for x in value
    ):
        raise rope.error(name, value, "expected a list of numbers above 0")
    return tuple(float(x) for x in value)
