"""Granite 3 (`granite`; with experts `granitemoe`, `granitemoeshared`), and Granite 4, with layers of Mamba 2."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import GRANITE_NAMES, ExpertsSpec, Routing
from ..spec.layer_form import AttentionForm, Biases, LayerForm, ModuleNames
from ..spec.state_spec import Mamba2Spec, StateSpec
from .family import GGUF, LAYER_NAMES, Facts, Family
from .gguf_readers import kv_heads, mixture_of
from .hf_readers import rope_facts
from .hf_rope import read_rope
from .mamba import MAMBA2_NAMES, MAX_TAPS, mamba2_state, time_step_bounds, with_conv_bias

_STATE_KINDS: Final = ("mamba", "linear_attention")
_KINDS: Final = (*_STATE_KINDS, "attention", "full_attention")


def _granite(fields: Fields) -> Facts:
    def multiplier(name: str) -> float:
        return fields.number(name, 1e-6, 1e6, default=1.0)

    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "biases": Biases(qkv=bias, attention_out=bias, mlp=fields.boolean("mlp_bias", default=False)),
        "attention": AttentionForm(query_scale=multiplier("attention_multiplier")),
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
    return facts | {"form": form, "biases": structs.replace(facts["biases"], mlp=False), "experts": experts}


def _granite_hybrid(fields: Fields) -> Facts:
    """Layers of Mamba 2 and of attention, or of attention only; with experts beside the shared MLP, or without."""
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    position = fields.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise fields.error("position_embedding_type", position, "expected rope, nope or null")
    shared = fields.integer("shared_intermediate_size", 1, 1 << 22, default=1024)
    layers = _state_layers(fields, num_layers)
    facts = _mixture(fields, shared) | {
        "rope_layers": () if position == "rope" else (False,) * num_layers,
        "state": _mamba2(fields, layers) if any(layers) else None,
    }
    if fields.integer("num_local_experts", 0, 1 << 16, default=8) == 0:
        facts |= {"experts": None, "intermediate_size": shared}
    return facts


def _state_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers are of Mamba 2; without a list all are."""
    name = fields.given("layer_types", "layers_block_type")
    kinds = fields.get(name)
    if kinds is None:
        return (True,) * num_layers
    if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
        raise fields.error(name, kinds, f"expected a list of {', '.join(_KINDS[:-1])} and {_KINDS[-1]}")
    return tuple(kind in _STATE_KINDS for kind in kinds)


def _mamba2(fields: Fields, layers: tuple[bool, ...]) -> StateSpec:
    expand = fields.integer("mamba_expand", 1, 1 << 10, default=2)
    size = expand * fields.integer("hidden_size", 1, 1 << 20)
    num_heads = fields.integer("mamba_n_heads", 1, 1 << 16, default=128)
    head_dim = size // num_heads
    if fields.get("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head", 1, 1 << 16)
    if num_heads * head_dim != size:
        rule = f"but {num_heads} heads of {head_dim} are not {expand} times the hidden size, {size}"
        raise fields.error("mamba_n_heads", num_heads, rule)
    least, most = time_step_bounds(fields, "time_step_limit")
    mamba = Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.integer("mamba_n_groups", 1, 1 << 16, default=1),
        state_dim=fields.integer("mamba_d_state", 1, 1 << 16, default=256),
        projection_bias=fields.boolean("mamba_proj_bias", default=False),
        least_step=least,
        most_step=most,
    )
    return StateSpec(
        layers=layers,
        conv_size=mamba.conv_size,
        conv_taps=fields.integer("mamba_d_conv", 2, MAX_TAPS, default=4),
        conv_bias=fields.boolean("mamba_conv_bias", default=True),
        mamba=mamba,
    )


def _granite_gguf(fields: Fields, arch: str) -> Facts:
    """Factors that are missing or 0 are those of Llama. A model is marked as not finetuned if it has no rotary."""
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    rotates = fields.boolean(f"{arch}.rope.scaling.finetuned", default=True)

    def factor(name: str) -> float | None:
        return fields.number(f"{arch}.{name}", 0.0, 1e6, default=0.0) or None

    return {
        "rope_layers": () if rotates else (False,) * num_layers,
        "attention": AttentionForm(query_scale=factor("attention.scale")),
        "form": LayerForm(
            embedding_scale=factor("embedding_scale") or 1.0,
            residual_scale=factor("residual_scale") or 1.0,
            logits_scale=1 / fields.number(f"{arch}.logit_scale", 1e-6, 1e6),
        ),
    }


def _granite_moe_gguf(fields: Fields, arch: str) -> Facts:
    """The file has the parts of the shared expert by themselves."""
    shared = fields.integer(f"{arch}.expert_shared_feed_forward_length", 0, 1 << 22, default=0)
    experts = structs.replace(mixture_of(fields, arch, _NAMES), shared_size=shared)
    return _granite_gguf(fields, arch) | {"experts": experts}


def _granite_hybrid_gguf(fields: Fields, arch: str) -> Facts:
    """A layer without heads of keys and values is one of Mamba 2; files without experts have their number, 0."""
    heads = kv_heads(fields, arch)
    sparse = fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) > 0
    facts = _granite_moe_gguf(fields, arch) if sparse else _granite_gguf(fields, arch)
    return facts | {
        "num_kv_heads": max(heads),
        "state": mamba2_state(fields, arch, tuple(count == 0 for count in heads)),
    }


_NAMES: Final = structs.replace(GRANITE_NAMES, shared_in_block=True)


FAMILIES: Final = (
    Family(
        "granite",
        structure="llama",
        published="Granite 3",
        architecture="GraniteForCausalLM",
        read=_granite,
        gguf={"granite": GGUF(_granite_gguf, neighbors=True)},
    ),
    Family(
        "granitemoe",
        structure="llama",
        published="Granite 3 1B-A400M, 3B-A800M; PowerMoE",
        architecture="GraniteMoeForCausalLM",
        read=_granite_moe,
        gguf={"granitemoe": GGUF(_granite_moe_gguf, has_experts=True, neighbors=True)},
    ),
    Family(
        "granitemoeshared",
        structure="llama",
        published="Granite with experts and a shared one",
        architecture="GraniteMoeSharedForCausalLM",
        read=_granite_moe_shared,
        stored_as="granitemoe",
    ),
    Family(
        "granitemoehybrid",
        structure="hybrid",
        published="Granite 4 H-Small, H-Tiny, H-Micro, Micro and others",
        architecture="GraniteMoeHybridForCausalLM",
        read=_granite_hybrid,
        gguf={
            "granitehybrid": GGUF(
                _granite_hybrid_gguf,
                {**LAYER_NAMES, **MAMBA2_NAMES},
                has_experts=True,
                neighbors=True,
                of_tensors=with_conv_bias,
            )
        },
    ),
)
