"""SmolLM3."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.layer_form import Biases, WindowsSpec
from .family import GGUF, Facts, Family
from .hf_readers import layer_types, rope_facts, rope_layers
from .hf_rope import MAX_POSITIONS, read_rope


def _smollm3(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    rotates = rope_layers(fields)
    return (
        rope_facts(fields, read_rope(fields, 2_000_000.0))
        | _windows(fields, rotates)
        | {
            "rope_layers": rotates,
            "biases": Biases(qkv=bias, attention_out=bias, mlp=fields.boolean("mlp_bias", default=False)),
        }
    )


def _windows(fields: Fields, rotates: tuple[bool, ...]) -> Facts:
    """Layers without rotary have a window, if windows are enabled and no `layer_types` say otherwise."""
    if not fields.boolean("use_sliding_window", default=False) or fields.get("sliding_window") is None:
        return {}
    has_types = fields.get("layer_types") is not None
    windowed = layer_types(fields) if has_types else tuple(not one for one in rotates)
    if not any(windowed):
        return {}
    window = fields.integer("sliding_window", 1, MAX_POSITIONS)
    return {"windows": WindowsSpec(size=window, layers=windowed)}


_INTERVAL: Final = 4  # every fourth layer has no rotary; files do not say


def _smollm3_gguf(fields: Fields, arch: str) -> Facts:
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    return {"rope_layers": tuple((layer + 1) % _INTERVAL != 0 for layer in range(num_layers))}


FAMILIES: Final = (
    Family(
        "smollm3",
        structure="llama",
        published="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        read=_smollm3,
        tied=True,
        gguf={"smollm3": GGUF(_smollm3_gguf, neighbors=True)},
    ),
)
