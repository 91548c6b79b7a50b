"""Llama 4. llama.cpp knows the chunks, the layers without rotary, and the factors of queries without the file."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...hf.families.family import windows_by_pattern
from ...hf.families.llama4 import CHUNK, FORM, NAMES, TEMPERATURE, routing
from ...spec.attention_form import AttentionForm
from .family import LAYER_NAMES, Facts, GGUFFamily, windowed_layers
from .mixtral import mixture_of

_PERIOD: Final = 4  # every fourth layer neither rotates nor has chunks
_MAVERICK_EXPERTS: Final = 128
"""A model with so many experts has no norms of q and k: llama.cpp tells it by them."""


def _llama4(fields: Fields, arch: str) -> Facts:
    key = f"{arch}.attention.sliding_window"
    if fields.get(key) == 0:
        raise fields.error(key, 0, "a model without chunks is not supported in this format; give its folder")
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    rotates = windows_by_pattern(_PERIOD, num_layers)
    experts = mixture_of(fields, arch, NAMES)
    step = fields.integer(f"{arch}.interleave_moe_layer_step", 1, 1 << 12)
    experts = structs.replace(
        experts,
        routing=routing(experts.num_active),
        dense_layers=tuple(layer for layer in range(num_layers) if (layer + 1) % step),
        shared_size=experts.intermediate_size,
        scales_inputs=True,
    )
    return {
        "form": structs.replace(FORM, unit_qk_norm=experts.num_experts != _MAVERICK_EXPERTS),
        "rope_layers": rotates,
        "temperature": None if all(rotates) else TEMPERATURE,
        "sliding_window": CHUNK,
        "windowed_layers": windowed_layers(fields, arch, default=_PERIOD),
        "attention": AttentionForm(chunked=True),
        "experts": experts,
    }


_NAMES: Final = {module.replace("mlp.", "feed_forward."): stored for module, stored in LAYER_NAMES.items()}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "llama4": GGUFFamily("llama4_text", _llama4, _NAMES, has_experts=True)
}
