"""Llama 4. llama.cpp knows the chunks, the layers without rotary, and the factors of queries without the file."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import AttentionForm, Biases, LayerForm, ModuleNames, TemperatureTuning, WindowsSpec
from .family import GGUF, LAYER_NAMES, Facts, Family
from .gguf_readers import mixture_of, windowed_layers
from .hf_readers import layer_types, rope_facts, rope_layers, windows_by_pattern
from .hf_rope import MAX_POSITIONS, read_rope

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
    windows = _chunks(fields, rotates)
    temperature = None if all(rotates) else _temperature(fields)
    return rope_facts(fields, read_rope(fields, _THETA, kinds=_KINDS)) | {
        "rope_layers": rotates,
        "windows": windows,
        "attention": AttentionForm(chunked=windows is not None, temperature=temperature),
        "biases": Biases(qkv=bias, attention_out=bias),
        "form": structs.replace(FORM, unit_qk_norm=fields.boolean("use_qk_norm", default=True)),
        "intermediate_size": fields.integer("intermediate_size_mlp", 1, 1 << 22, default=16_384),
        "experts": _experts(fields),
    }


def _chunks(fields: Fields, rotates: tuple[bool, ...]) -> WindowsSpec | None:
    """Layers with rotary attend to their chunk, if no `layer_types` say otherwise."""
    name = "attention_chunk_size"
    if fields.get(name) is None and name in fields:
        raise fields.error(name, None, "expected a whole number; omit it for 8192")
    size = fields.integer(name, 1, MAX_POSITIONS, default=CHUNK)
    given = fields.get("layer_types") is not None
    chunked = layer_types(fields, windowed="chunked_attention") if given else rotates
    return WindowsSpec(size=size, layers=chunked) if any(chunked) else None


def _temperature(fields: Fields) -> TemperatureTuning | None:
    """Temperature of layers without rotary; the first files have a number as its switch."""
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


_PERIOD: Final = 4  # every fourth layer neither rotates nor has chunks
_MAVERICK_EXPERTS: Final = 128
"""A model with so many experts has no norms of q and k: llama.cpp tells it by them."""


def _llama4_gguf(fields: Fields, arch: str) -> Facts:
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
        "windows": WindowsSpec(size=CHUNK, layers=windowed_layers(fields, arch, default=_PERIOD)),
        "attention": AttentionForm(chunked=True, temperature=None if all(rotates) else TEMPERATURE),
        "experts": experts,
    }


_NAMES: Final = {module.replace("mlp.", "feed_forward."): stored for module, stored in LAYER_NAMES.items()}


FAMILIES: Final = (
    Family(
        "llama4_text",
        structure="llama",
        published="Llama 4 Scout, Llama 4 Maverick; MobileLLM-R1",
        architecture="Llama4ForCausalLM",
        read=_llama4,
        head_dim=128,
        body="Llama4TextModel",
        gguf={"llama4": GGUF(_llama4_gguf, _NAMES, has_experts=True)},
    ),
)
