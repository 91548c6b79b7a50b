"""Granite 3, and Granite 4; `granitemoe` has experts, `granitehybrid` layers of Mamba 2."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.experts_spec import GRANITE_NAMES
from ...spec.layer_form import LayerForm
from .family import LAYER_NAMES, Facts, GGUFFamily
from .mamba import MAMBA2_NAMES, kv_heads, mamba2_state, with_conv_bias
from .mixtral import mixture_of


def _granite(fields: Fields, arch: str) -> Facts:
    """Factors that are missing or 0 are those of Llama. A model is marked as not finetuned if it has no rotary."""
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    rotates = fields.boolean(f"{arch}.rope.scaling.finetuned", default=True)

    def factor(name: str) -> float | None:
        return fields.number(f"{arch}.{name}", 0.0, 1e6, default=0.0) or None

    return {
        "rope_layers": () if rotates else (False,) * num_layers,
        "query_scale": factor("attention.scale"),
        "form": LayerForm(
            embedding_scale=factor("embedding_scale") or 1.0,
            residual_scale=factor("residual_scale") or 1.0,
            logits_scale=1 / fields.number(f"{arch}.logit_scale", 1e-6, 1e6),
        ),
    }


def _granite_moe(fields: Fields, arch: str) -> Facts:
    """The file has the parts of the shared expert by themselves."""
    shared = fields.integer(f"{arch}.expert_shared_feed_forward_length", 0, 1 << 22, default=0)
    experts = structs.replace(mixture_of(fields, arch, _NAMES), shared_size=shared)
    return _granite(fields, arch) | {"experts": experts}


def _granite_hybrid(fields: Fields, arch: str) -> Facts:
    """A layer without heads of keys and values is one of Mamba 2; files without experts have their number, 0."""
    heads = kv_heads(fields, arch)
    sparse = fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) > 0
    facts = _granite_moe(fields, arch) if sparse else _granite(fields, arch)
    return facts | {
        "num_kv_heads": max(heads),
        "state": mamba2_state(fields, arch, tuple(count == 0 for count in heads)),
    }


_NAMES: Final = structs.replace(GRANITE_NAMES, shared_in_block=True)

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "granite": GGUFFamily("granite", _granite, neighbors=True),
    "granitemoe": GGUFFamily(
        "granitemoe", _granite_moe, has_experts=True, neighbors=True, also=("granitemoeshared",)
    ),
    "granitehybrid": GGUFFamily(
        "granitemoehybrid",
        _granite_hybrid,
        {**LAYER_NAMES, **MAMBA2_NAMES},
        has_experts=True,
        neighbors=True,
        of_tensors=with_conv_bias,
    ),
}
