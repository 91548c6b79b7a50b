"""SmolLM3."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ..hf_rope import MAX_POSITIONS, read_rope
from .family import Facts, Family, layer_types, rope_facts


def _smollm3(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    rope_layers = _rope_layers(fields)
    return (
        rope_facts(fields, read_rope(fields, 2_000_000.0))
        | _windows(fields, rope_layers)
        | {
            "rope_layers": rope_layers,
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": fields.boolean("mlp_bias", default=False),
        }
    )


def _rope_layers(fields: Fields) -> tuple[bool, ...]:
    """From `no_rope_layers`, which holds 1 for a layer with rotary and may be longer than the model."""
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    name = "no_rope_layers"
    value = fields.get(name)
    if value is None:
        interval = fields.integer("no_rope_layer_interval", 1, 1 << 12, default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(value, list) or len(value) < num_layers or any(one not in (0, 1) for one in value):
        raise fields.error(
            name, value, f"expected at least {num_layers} numbers, 1 for a layer with rotary, else 0"
        )
    return tuple(bool(one) for one in value[:num_layers])


def _windows(fields: Fields, rope_layers: tuple[bool, ...]) -> Facts:
    """Layers without rotary have a window, if windows are enabled and no `layer_types` say otherwise."""
    if not fields.boolean("use_sliding_window", default=False) or fields.get("sliding_window") is None:
        return {}
    has_types = fields.get("layer_types") is not None
    windowed = layer_types(fields) if has_types else tuple(not rotates for rotates in rope_layers)
    if not any(windowed):
        return {}
    window = fields.integer("sliding_window", 1, MAX_POSITIONS)
    return {"sliding_window": window, "windowed_layers": windowed}


FAMILIES: Final[dict[str, Family]] = {"smollm3": Family("SmolLM3ForCausalLM", _smollm3, tied=True)}
