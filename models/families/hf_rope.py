"""Rotary position embedding in config.json, in the formats of transformers 4 and 5.

Transformers 4 writes `rope_theta` and `rope_scaling`. Transformers 5 writes `rope_parameters` with both; if kinds of
layers differ, it holds one such object per kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from msgspec import structs

from ..fields import Fields
from ..spec.layer_form import RopeScaling

MAX_POSITIONS: Final = 1 << 30

KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope")
PROPORTIONAL: Final = "proportional"
DYNAMIC: Final = "dynamic"
"""Like `default` for positions below `max_position_embeddings`, and the engine serves no others."""
_OLD_NAMES: Final = {"su": "longrope"}
_NEW, _OLD = "rope_parameters", "rope_scaling"
_ORIGINAL: Final = "original_max_position_embeddings"
_FULL, _SLIDING = "full_attention", "sliding_attention"

T = TypeVar("T")


class Rope(NamedTuple):
    """The rotary facts for `ModelSpec`.

    Attributes:
        mscale: yarn's factor of whole queries and of whole keys, which DeepSeek applies beside `attention_factor`.
    """

    theta: float
    scaling: RopeScaling
    partial_factor: float
    mscale: float = 1.0


def read_rope(
    fields: Fields,
    default_theta: float = 10000.0,
    *,
    kinds: tuple[str, ...] = KINDS,
    outer_original: bool = False,
    default_partial: float = 1.0,
) -> Rope:
    """Base frequency and scaling of a model with the same rope in all layers.

    Args:
        fields: of config.json.
        default_theta: base frequency if the file has none.
        kinds: the scalings of this architecture.
        outer_original: whether `original_max_position_embeddings` at the top level has precedence, as in Phi-3.
        default_partial: the part of each head that rotates if the file does not say.

    Raises:
        ConfigError: a field is wrong, the scaling is not implemented, or two spellings contradict each other.
    """

    def read(name: str, values: Mapping[str, object]) -> Rope:
        if any(isinstance(value, Mapping) for value in values.values()):
            raise fields.error(name, values, "a different rope for some of the layers is not supported")
        rope = Fields(fields.path, values, prefix=f"{name}.")
        return read_one_rope(fields, rope, default_theta, kinds, outer_original, default_partial)

    return _read_both(fields, read)


def read_two_ropes(
    fields: Fields,
    default_theta: float,
    local_field: str,
    default_local_theta: float,
    *,
    kinds: tuple[str, ...] = KINDS,
) -> tuple[Rope, float]:
    """The rope of the full-attention layers, and the base frequency of the windowed layers.

    `kinds`: the scalings of this architecture.

    Raises:
        ConfigError: see `read_rope`.
    """

    # `_OLD` describes the full-attention layers; in `_NEW` each kind of layer has its own object.
    def read(name: str, values: Mapping[str, object]) -> tuple[Rope, float]:
        theta = fields.number("rope_theta", 1.0, 1e15, default=default_theta)
        local_theta = fields.number(local_field, 1.0, 1e15, default=default_local_theta)
        if name == _OLD and _FULL not in values and _SLIDING not in values:
            if values.get("type") is not None and values.get("rope_type") is None:
                raise fields.error(
                    f"{_OLD}.type", values["type"], "which transformers ignores here; name it rope_type"
                )
            return read_one_rope(
                fields, Fields(fields.path, values, prefix=f"{name}."), default_theta
            ), local_theta
        if values and _FULL not in values and _SLIDING not in values:
            raise fields.error(name, values, f"expected an object for {_FULL} and one for {_SLIDING}")
        ropes = []
        for kind, base in ((_FULL, theta), (_SLIDING, local_theta)):
            inner = values.get(kind) or {}
            if not isinstance(inner, Mapping):
                raise fields.error(f"{name}.{kind}", inner, "expected an object or null")
            prefix = f"{name}.{kind}."
            inner = {**inner, "rope_theta": base if inner.get("rope_theta") is None else inner["rope_theta"]}
            ropes.append(read_one_rope(fields, Fields(fields.path, inner, prefix=prefix), base, kinds))
        if ropes[1].scaling != RopeScaling():
            raise fields.error(f"{name}.{_SLIDING}", values[_SLIDING], "windowed layers must not be scaled")
        if ropes[0].partial_factor != ropes[1].partial_factor:
            rule = f"expected the partial_rotary_factor of {_FULL}, {ropes[0].partial_factor}"
            raise fields.error(f"{name}.{_SLIDING}", values.get(_SLIDING), rule)
        return ropes[0], ropes[1].theta

    return _read_both(fields, read)


def _read_both(fields: Fields, read: Callable[[str, Mapping[str, object]], T]) -> T:
    """Read the spelling that the file has; if it has both, they must agree.

    transformers takes `rope_scaling` then, and drops everything in `rope_parameters`, including the base frequency. A
    user who adds `rope_scaling` to a newer file, for a longer context, does not mean that.
    """
    given: dict[str, Mapping[str, object]] = {}
    for name in (_NEW, _OLD):
        values = fields.get(name)
        if values is not None and not isinstance(values, Mapping):
            raise fields.error(name, values, "expected an object or null")
        if values:
            given[name] = values
    if not given:
        return read(_OLD, {})
    found = [read(name, values) for name, values in given.items()]
    if found[0] != found[-1]:
        raise fields.error(
            _NEW,
            given[_NEW],
            f"but {_OLD} is {dict(given[_OLD])}: they contradict each other; put all into {_NEW}",
        )
    return found[0]


def read_one_rope(
    fields: Fields,
    rope: Fields,
    default_theta: float,
    kinds: tuple[str, ...] = KINDS,
    outer_original: bool = False,
    default_partial: float = 1.0,
) -> Rope:
    """One rope; fields missing in its own object, `rope`, are read from the top level.

    Llama 1 and 2 were published without a base; 10000 is the one they were trained with.
    """
    theta = rope.number("rope_theta", 1.0, 1e15, fields.number("rope_theta", 1.0, 1e15, default_theta))
    partial = rope.number(
        "partial_rotary_factor", 0.0, 1.0, fields.number("partial_rotary_factor", 0.0, 1.0, default_partial)
    )
    scaling = _scaling(fields, rope, kinds, outer_original)
    if scaling.kind == PROPORTIONAL:  # all of a head is a pair of halves, of which a part does not turn
        return Rope(theta, structs.replace(scaling, turning_part=partial), 1.0)
    return Rope(theta, scaling, partial, _mscale(rope, scaling.factor) if scaling.kind == "yarn" else 1.0)


def _scaling(fields: Fields, rope: Fields, kinds: tuple[str, ...], outer_original: bool) -> RopeScaling:
    kind_field = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.text(kind_field, default="default")
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in kinds:
        raise rope.error(kind_field, kind, f"which is not supported; supported are: {', '.join(kinds)}")
    if kind in ("default", DYNAMIC):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor", 1.0, 1e6))
    if kind == PROPORTIONAL:
        return RopeScaling(kind="proportional", factor=rope.number("factor", 1.0, 1e6, default=1.0))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor", 1.0, 1e6),
            low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
            high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
            original_max_position=_original(fields, rope, outer_original),
        )
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    original = _original(fields, rope, outer_original)
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


def _original(fields: Fields, rope: Fields, outer_original: bool) -> int:
    """Positions of the training before the context was extended.

    Phi-3 has it at the top level, where it has precedence. transformers ignores it there for other models; such a file
    is refused unless both agree.
    """
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    original = rope.integer(_ORIGINAL, 2, MAX_POSITIONS, default=max_position)
    outer = fields.get(_ORIGINAL)
    if outer is None:
        return original
    outer = fields.integer(_ORIGINAL, 2, MAX_POSITIONS)
    if outer_original or outer == original:
        return outer
    inner = rope.get(_ORIGINAL)
    raise fields.error(
        _ORIGINAL, outer, f"but the one of the rope's object is {inner}; put one value into that object"
    )


def _sharpness(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _mscale(rope: Fields, factor: float) -> float:
    return _sharpness(factor, rope.number("mscale_all_dim", 0.0, 1e3, default=0.0))


def _yarn(rope: Fields, factor: float, original: int) -> RopeScaling:
    default = _sharpness(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = _sharpness(factor, rope.number("mscale", 0.0, 1e3)) / _mscale(rope, factor)
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
