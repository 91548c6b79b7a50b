"""Llama 4: rotary and chunks in most layers, neither in the others, and experts with weighted inputs."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.attention_form import AttentionForm, TemperatureTuning
from ...spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ...spec.layer_form import LayerForm, ModuleNames
from ..hf_rope import MAX_POSITIONS, read_rope
from .family import Facts, Family, layer_types, rope_facts, rope_layers

NAMES: Final = ExpertNames(
    block="feed_forward", router="router", shared="shared_expert", stacks_transposed=True
)
FORM: Final = LayerForm(interleaved_rope=True, names=ModuleNames(mlp="feed_forward"))
CHUNK: Final = 8192
TEMPERATURE: Final = TemperatureTuning(scale=0.1, length=8192, offset=1, unrotated_only=True)
_THETA: Final = 500_000.0
_KINDS: Final = (
    "default",
    "linear",
    "llama3",
)  # the others have a factor, which the norms of q and k would remove


def _llama4(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    rotates = rope_layers(fields)
    return (
        rope_facts(fields, read_rope(fields, _THETA, kinds=_KINDS))
        | _chunks(fields, rotates)
        | {
            "rope_layers": rotates,
            "temperature": None if all(rotates) else _temperature(fields),
            "attention_bias": bias,
            "attention_out_bias": bias,
            "form": structs.replace(FORM, unit_qk_norm=fields.boolean("use_qk_norm", default=True)),
            "intermediate_size": fields.integer("intermediate_size_mlp", 1, 1 << 22, default=16_384),
            "experts": _experts(fields),
        }
    )


def _chunks(fields: Fields, rotates: tuple[bool, ...]) -> Facts:
    """Layers with rotary attend to their chunk, if no `layer_types` say otherwise."""
    name = "attention_chunk_size"
    if fields.get(name) is None and name in fields:
        raise fields.error(name, None, "expected a whole number; omit it for 8192")
    size = fields.integer(name, 1, MAX_POSITIONS, default=CHUNK)
    given = fields.get("layer_types") is not None
    chunked = layer_types(fields, windowed="chunked_attention") if given else rotates
    if not any(chunked):
        return {}
    return {
        "sliding_window": size,
        "windowed_layers": chunked,
        "attention": AttentionForm(chunked=True),
    }


def _temperature(fields: Fields) -> TemperatureTuning | None:
    """That of layers without rotary; the first files have a number as its switch."""
    name = "attn_temperature_tuning"
    switch = fields.get(name)
    is_on = bool(switch) if isinstance(switch, int) else fields.boolean(name, default=True)
    scale = fields.number("attn_scale", 0.0, 1e3, default=TEMPERATURE.scale)
    length = fields.number("floor_scale", 1.0, 1e9, default=TEMPERATURE.length)
    return structs.replace(TEMPERATURE, scale=scale, length=length) if is_on and scale else None


def _experts(fields: Fields) -> ExpertsSpec | None:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    if fields.get("moe_layers") is None:
        step = fields.integer("interleave_moe_layer_step", 1, 1 << 12, default=1)
        sparse = set(range(step - 1, num_layers, step))
    else:
        sparse = {layer for layer in fields.integers("moe_layers", 0, 1 << 12) if layer < num_layers}
    if not sparse:
        return None
    size = fields.integer("intermediate_size", 1, 1 << 22)
    return ExpertsSpec(
        num_experts=fields.integer(fields.given("num_local_experts", "num_experts"), 1, 1 << 16, default=16),
        intermediate_size=size,
        routing=routing(fields.integer("num_experts_per_tok", 1, 1 << 16, default=1)),
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in sparse),
        shared_size=size,
        scales_inputs=True,
        names=NAMES,
    )


def routing(num_active: int) -> Routing:
    """The experts with the largest logits, and their sigmoids."""
    return Routing(num_active=num_active, normalize=False, scores="sigmoid")


FAMILIES: Final[dict[str, Family]] = {
    "llama4_text": Family("Llama4ForCausalLM", _llama4, head_dim=128, body="Llama4TextModel")
}
