"""Readers of fields of config.json that several families share: windows, layer kinds, rotary."""

from __future__ import annotations

from ..fields import Fields
from ..spec.layer_form import AttentionForm, WindowsSpec
from .family import Facts
from .hf_rope import MAX_POSITIONS, Rope


def windows_by_pattern(pattern: int, num_layers: int) -> tuple[bool, ...]:
    """All layers have a window except every `pattern`th."""
    return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))


def window_everywhere(fields: Fields, missing: int | None = None) -> Facts:
    """`windows` in all layers, if `sliding_window` is set; `missing`: of a file without the field, null is none."""
    if fields.get("sliding_window") is None and ("sliding_window" in fields or missing is None):
        return {}
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    size = fields.integer("sliding_window", 1, MAX_POSITIONS, default=missing)
    return {"windows": WindowsSpec(size=size, layers=(True,) * num_layers)}


def score_cap(fields: Fields) -> Facts:
    """`attn_logit_softcapping`, if it is set."""
    name = "attn_logit_softcapping"
    if fields.get(name) is None:
        return {}
    return {"attention": AttentionForm(score_cap=fields.number(name, 1e-3, 1e6))}


def windows_by_types(fields: Fields, pattern: int, named: str | None = None) -> tuple[bool, ...]:
    """From `layer_types`; without it, all layers have a window except every `pattern`th.

    Args:
        named: a field that may hold another pattern, also in a form that is not read beside `layer_types`.
    """
    if fields.get("layer_types") is not None:
        return layer_types(fields)
    if named is not None:
        pattern = fields.integer(named, 1, 1 << 12, default=pattern)
    return windows_by_pattern(pattern, fields.integer("num_hidden_layers", 1, 1 << 12))


def layer_types(fields: Fields, windowed: str = "sliding_attention") -> tuple[bool, ...]:
    """Which layers have a window, from the field `layer_types`; `windowed`: the type of those."""
    value = fields.get("layer_types")
    known = ("full_attention", windowed)
    if not isinstance(value, list) or any(kind not in known for kind in value):
        raise fields.error("layer_types", value, f"expected a list of {' and '.join(known)}")
    return tuple(kind == windowed for kind in value)


def rope_layers(fields: Fields) -> tuple[bool, ...]:
    """From `no_rope_layers`, which holds 1 for a layer with rotary and may be longer than the model, or empty."""
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    name = "no_rope_layers"
    value = fields.get(name)
    if value is None or value == []:
        interval = fields.integer("no_rope_layer_interval", 1, 1 << 12, default=4)
        return windows_by_pattern(interval, num_layers)
    if not isinstance(value, list) or len(value) < num_layers or any(one not in (0, 1) for one in value):
        raise fields.error(
            name, value, f"expected at least {num_layers} numbers, 1 for a layer with rotary, else 0"
        )
    return tuple(bool(one) for one in value[:num_layers])


def head_dim_of(fields: Fields, default: int | None) -> int:
    """`head_dim`; null is the hidden size divided by the heads, also where a file without it has a default."""
    divided = fields.integer("hidden_size", 1, 1 << 20) // fields.integer("num_attention_heads", 1, 1 << 12)
    return fields.integer(
        "head_dim", 1, 1 << 12, default=divided if "head_dim" in fields else default or divided
    )


def partial_rope_facts(fields: Fields, rope: Rope, head_dim: int | None = None) -> Facts:
    """The rotary embedding of a model in which a part of each head rotates.

    Args:
        head_dim: the default for a file without one; None: hidden size divided by heads.
    """
    rotary_dim = int(head_dim_of(fields, head_dim) * rope.partial_factor)
    if rotary_dim == 0:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "a part of each head must rotate")
    facts = rope_facts(fields, rope._replace(partial_factor=1.0))
    return facts | {"rotary_dim": None if rope.partial_factor == 1.0 else rotary_dim}


def rope_facts(fields: Fields, rope: Rope) -> Facts:
    """The rotary embedding of a model whose heads rotate whole."""
    if rope.partial_factor != 1.0:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "only 1.0 is supported")
    return {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
