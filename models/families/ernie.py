"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import ERNIE_NAMES, ExpertsSpec, Routing
from ..spec.layer_form import Biases, LayerForm
from .deepseek import further_layers
from .family import GGUF, Facts, Family
from .gguf_readers import mixture_of
from .hf_readers import rope_facts
from .hf_rope import read_rope

FORM: Final = LayerForm(interleaved_rope=True)
_LEAST_SUM: Final = 1e-12  # of shares before they are divided by it: too little to matter


def _ernie4_5(fields: Fields) -> Facts:
    bias = fields.boolean("use_bias", default=False)
    return rope_facts(fields, read_rope(fields, 500_000.0)) | {
        "biases": Biases(qkv=bias, attention_out=bias, mlp=bias),
        "form": FORM,
    }


def _ernie4_5_moe(fields: Fields) -> Facts:
    facts = _ernie4_5(fields)
    form = structs.replace(FORM, head_bias=facts["biases"].mlp)
    return facts | further_layers(fields) | {"form": form, "experts": _experts(fields)}


def _experts(fields: Fields) -> ExpertsSpec | None:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    first = fields.integer("moe_layer_start_index", 0, 1 << 12, default=1)
    last = fields.integer("moe_layer_end_index", -1, 1 << 12, default=-1)
    step = fields.integer("moe_layer_interval", 1, 1 << 12, default=1)
    end = num_layers if last == -1 else min(last + 1, num_layers)
    sparse = [layer for layer in range(first, end) if (layer + 1) % step == 0]
    if not sparse:
        return None
    least = fields.number("moe_norm_min", 0.0, 1.0, default=_LEAST_SUM)
    if least > _LEAST_SUM:
        raise fields.error("moe_norm_min", least, f"only {_LEAST_SUM:g} or less is supported")
    size = fields.integer("moe_intermediate_size", 1, 1 << 22, default=1536)
    return ExpertsSpec(
        num_experts=fields.integer(fields.given("moe_num_experts", "num_experts"), 1, 1 << 16, default=64),
        intermediate_size=size,
        routing=routing(fields.integer(fields.given("moe_k", "num_experts_per_tok"), 1, 1 << 16, default=6)),
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in sparse),
        shared_size=size * fields.integer("moe_num_shared_experts", 0, 1 << 8, default=2),
        names=ERNIE_NAMES,
    )


def routing(num_active: int) -> Routing:
    """Shares are those of a softmax; the choice has a bias."""
    return Routing(num_active=num_active, has_bias=True, float32_logits=True)


def _ernie4_5_gguf(fields: Fields, arch: str) -> Facts:
    return {"form": FORM}


def _ernie4_5_moe_gguf(fields: Fields, arch: str) -> Facts:
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    first = fields.integer(f"{arch}.leading_dense_block_count", 0, 1 << 12, default=0)
    step = fields.integer(f"{arch}.interleave_moe_layer_step", 1, 1 << 12)
    experts = mixture_of(fields, arch, ERNIE_NAMES)
    num_shared = fields.integer(f"{arch}.expert_shared_count", 0, 1 << 8, default=0)
    experts = structs.replace(
        experts,
        routing=routing(experts.num_active),
        dense_layers=tuple(n for n in range(num_layers) if n < first or (n + 1) % step),
        shared_size=num_shared * experts.intermediate_size,
    )
    return {"form": FORM, "experts": experts}


FAMILIES: Final = (
    Family(
        "ernie4_5_moe",
        structure="llama",
        published="ERNIE 4.5 21B-A3B, 300B-A47B",
        architecture="Ernie4_5_MoeForCausalLM",
        read=_ernie4_5_moe,
        tied=True,
        gguf={"ernie4_5-moe": GGUF(_ernie4_5_moe_gguf, has_experts=True)},
    ),
    Family(
        "ernie4_5",
        structure="llama",
        published="ERNIE 4.5 0.3B",
        architecture="Ernie4_5ForCausalLM",
        read=_ernie4_5,
        tied=True,
        head_dim=128,
        gguf={"ernie4_5": GGUF(_ernie4_5_gguf)},
    ),
)
