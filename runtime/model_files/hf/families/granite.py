"""Granite 3 (`granite`; with experts `granitemoe`, `granitemoeshared`), and Granite 4 without layers with a state."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...experts_spec import GRANITE_NAMES, ExpertsSpec, Routing
from ...fields import Fields
from ...layer_form import LayerForm, ModuleNames
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts

_ATTENTION: Final = ("attention", "full_attention")


def _granite(fields: Fields) -> Facts:
    def multiplier(name: str) -> float:
        return fields.number(name, 1e-6, 1e6, default=1.0)

    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "query_scale": multiplier("attention_multiplier"),
        "form": LayerForm(
            embedding_scale=multiplier("embedding_multiplier"),
            residual_scale=multiplier("residual_multiplier"),
            logits_scale=1 / multiplier("logits_scaling"),
        ),
    }


def _granite_moe(fields: Fields) -> Facts:
    return _mixture(fields, 0)


def _granite_moe_shared(fields: Fields) -> Facts:
    return _mixture(fields, fields.integer("shared_intermediate_size", 0, 1 << 22, default=0))


def _mixture(fields: Fields, shared_size: int) -> Facts:
    """Layers with experts beside the shared MLP, which alone may be there instead."""
    facts = _granite(fields)
    names = ModuleNames(mlp=GRANITE_NAMES.shared)
    experts = ExpertsSpec(
        num_experts=fields.integer("num_local_experts", 0, 1 << 16, default=8),
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        routing=Routing(num_active=fields.integer("num_experts_per_tok", 0, 1 << 16, default=2)),
        shared_size=shared_size,
        names=GRANITE_NAMES,
    )
    form = structs.replace(facts["form"], names=names, mlp_names=("input_linear", "output_linear"))
    return facts | {"form": form, "mlp_bias": False, "experts": experts}


def _granite_hybrid(fields: Fields) -> Facts:
    """The models of the line with attention only; they have rotary or, as those with state layers, none."""
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(one not in _ATTENTION for one in kinds):
        raise fields.error(
            "layer_types", kinds, "only layers with attention are supported, not those with a state"
        )
    position = fields.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise fields.error("position_embedding_type", position, "expected rope, nope or null")
    shared = fields.integer("shared_intermediate_size", 1, 1 << 22, default=1024)
    facts = _mixture(fields, shared) | {"rope_layers": () if position == "rope" else (False,) * num_layers}
    if fields.integer("num_local_experts", 0, 1 << 16, default=8) == 0:
        facts |= {"experts": None, "intermediate_size": shared}
    return facts


FAMILIES: Final[dict[str, Family]] = {
    "granite": Family("GraniteForCausalLM", _granite),
    "granitemoe": Family("GraniteMoeForCausalLM", _granite_moe),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", _granite_moe_shared),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", _granite_hybrid),
}
