"""Readers of keys of GGUF files that several architectures share: windows, heads, experts, yarn."""

from __future__ import annotations

import math

from ..fields import Fields
from ..spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import RopeScaling
from .family import Facts
from .hf_readers import windows_by_pattern


def as_list(value: object) -> object:
    """An array of a file as a list, any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def windowed_layers(fields: Fields, arch: str, default: int) -> tuple[bool, ...]:
    """Which layers have a window: one truth for each in the file, or all except every nth (default: `default`)."""
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    key = f"{arch}.attention.sliding_window_pattern"
    value = as_list(fields.get(key))
    if not isinstance(value, list):
        return windows_by_pattern(fields.integer(key, 1, 1 << 12, default=default), num_layers)
    if len(value) < num_layers or any(one not in (0, 1) for one in value):
        raise fields.error(key, value, f"expected a truth value for each of {num_layers} layers")
    return tuple(bool(one) for one in value[:num_layers])


def kv_heads(fields: Fields, arch: str) -> list[int]:
    """Heads of keys and values of each layer: the same number, or 0 in layers that do not attend."""
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    key = f"{arch}.attention.head_count_kv"
    value = fields.get(key)
    heads = as_list(value)
    if not isinstance(heads, list) or len(heads) != num_layers or len({*heads} - {0}) != 1:
        raise fields.error(key, value, f"expected the same number for each of {num_layers} layers, or 0")
    return heads


def mixture_of(fields: Fields, arch: str, names: ExpertNames, *, normalize: bool = True) -> ExpertsSpec:
    """The experts by the keys that all architectures have."""
    width = fields.integer(f"{arch}.feed_forward_length", 1, 1 << 22)
    return ExpertsSpec(
        num_experts=fields.integer(f"{arch}.expert_count", 1, 1 << 16),
        intermediate_size=fields.integer(f"{arch}.expert_feed_forward_length", 1, 1 << 22, default=width),
        routing=Routing(
            num_active=fields.integer(f"{arch}.expert_used_count", 1, 1 << 16), normalize=normalize
        ),
        names=names,
    )


def yarn_scaling(fields: Fields, arch: str) -> RopeScaling:
    """The scaling of a file whose `rope.scaling.type` is yarn."""
    key = f"{arch}.rope.scaling"
    factor = fields.number(f"{key}.factor", 1.0, 1e6)
    # Files with the factors of DeepSeek's yarn have both of them equal, so that angles are not scaled.
    scales_angles = not fields.number(f"{key}.yarn_log_multiplier", 0.0, 1e3, default=0.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=fields.integer(f"{key}.original_context_length", 2, 1 << 30),
        beta_fast=fields.number(f"{key}.yarn_beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=fields.number(f"{key}.yarn_beta_slow", 1e-6, 1e6, default=1.0),
        attention_factor=0.1 * math.log(factor) + 1.0 if scales_angles else 1.0,
    )


def no_facts(fields: Fields, arch: str) -> Facts:
    """For an architecture with the common fields only."""
    return {}
