"""Gemma 3n and Gemma 4: inputs of layers, layers that attend to keys and values of others, heads of two sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.attention_form import LayerHeads
from ...spec.layer_form import FOUR_NORMS, LayerForm
from ...spec.model_spec import RopeScaling
from ...spec.stream_spec import AltUpSpec, LayerInputsSpec
from ..hf_rope import KINDS, MAX_POSITIONS, PROPORTIONAL, Rope, read_two_ropes
from .family import Facts, Family, layer_types, rope_facts, windows_by_pattern
from .gemma import cap_of

_PATTERN: Final = {"gemma4": 6, "gemma3n": 5}
"""One layer in so many has no window, the last of them, if the file does not list the layers."""
_TABLE_ROWS: Final = 262_144
_LAYER_INPUT: Final = 256
_WIDE_HEAD: Final = 512
_OF_IMAGES: Final = "vision"


def _gemma4(fields: Fields) -> Facts:
    inputs = fields.integer("hidden_size_per_layer_input", 0, 1 << 16, default=_LAYER_INPUT)
    if fields.boolean("enable_moe_block", default=False):
        raise fields.error(
            "enable_moe_block",
            True,
            "a mixture of experts beside the MLP is not supported; use a dense model",
        )
    facts = _gemma4_layers(fields, window=512)
    if not inputs:
        return facts
    rows = fields.integer("vocab_size_per_layer_input", 1, 1 << 24, default=_TABLE_ROWS)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    if rows < vocab_size:
        raise fields.error(
            "vocab_size_per_layer_input", rows, f"expected at least vocab_size, which is {vocab_size}"
        )
    return facts | {"layer_inputs": LayerInputsSpec(size=inputs, vocab_size=rows)}


def _gemma4_unified(fields: Fields) -> Facts:
    for name in ("hidden_size_per_layer_input", "enable_moe_block"):
        if fields.get(name):
            raise fields.error(name, fields.get(name), "this kind of model has none; set it to 0")
    return _gemma4_layers(fields, window=1024)


def _gemma4_layers(fields: Fields, window: int) -> Facts:
    """What both kinds have; `window`: the default."""
    if fields.get("use_bidirectional_attention") not in (None, False, _OF_IMAGES):
        raise fields.error(
            "use_bidirectional_attention",
            fields.get("use_bidirectional_attention"),
            "only attention to earlier tokens is supported",
        )
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    windowed = _windows(fields, num_layers, _PATTERN["gemma4"])
    if windowed[-1]:  # as in transformers, whatever the file says
        windowed = (*windowed[:-1], False)
    sources = _sources(fields, windowed, default=0)
    heads = _heads(fields, windowed)
    narrow = heads[windowed.index(True) if any(windowed) else 0]
    rope, local_theta = _gemma4_ropes(fields)
    width = fields.integer("intermediate_size", 1, 1 << 21)
    facts = _common(fields, windowed, sources, window=window, cap=None)
    if fields.boolean("use_double_wide_mlp", default=False) and sources:
        shares = [source != layer for layer, source in enumerate(sources)]
        facts |= {
            "intermediate_size": max(width * (1 + wide) for wide in shares),
            "intermediate_sizes": tuple(width * (1 + wide) for wide in shares),
        }
    form = facts["form"]
    assert isinstance(form, LayerForm)
    return rope_facts(fields, rope) | {
        **facts,
        "form": structs.replace(
            form,
            full_keys_are_values=fields.boolean("attention_k_eq_v", default=False),
            layer_scalars=True,
        ),
        "head_dim": narrow.head_dim,
        "num_kv_heads": narrow.num_kv_heads,
        "layer_heads": heads,
        "local_rope_theta": local_theta,
    }


def _gemma4_ropes(fields: Fields) -> tuple[Rope, float]:
    """That of layers without a window, and the base of the others."""
    name = "rope_parameters"
    if fields.get("rope_scaling") is not None:
        raise fields.error(
            "rope_scaling", fields.get("rope_scaling"), f"which transformers ignores here; put it into {name}"
        )
    ropes = fields.get(name)
    if ropes is None:
        return Rope(1e6, RopeScaling(kind=PROPORTIONAL, turning_part=0.25), 1.0), 10_000.0
    for kind in ("full_attention", "sliding_attention"):
        rope = ropes.get(kind) if isinstance(ropes, Mapping) else None
        if not isinstance(rope, Mapping) or rope.get("rope_theta") is None:
            raise fields.error(f"{name}.{kind}", rope, "expected an object with rope_theta")
    return read_two_ropes(fields, 1e6, "rope_local_base_freq", 1e4, kinds=(*KINDS, PROPORTIONAL))


def _heads(fields: Fields, windowed: tuple[bool, ...]) -> tuple[LayerHeads, ...]:
    """The heads of each layer: `global_head_dim`, or a list of layers that differ, `per_layer_config`."""
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    narrow = LayerHeads(
        head_dim=fields.integer("head_dim", 1, 1 << 12, default=256),
        num_kv_heads=fields.integer("num_key_value_heads", 1, num_heads, default=min(4, num_heads)),
    )
    wide = LayerHeads(
        head_dim=fields.integer("global_head_dim", 1, 1 << 12, default=_WIDE_HEAD),
        num_kv_heads=narrow.num_kv_heads,
    )
    if fields.boolean("attention_k_eq_v", default=False):
        number = fields.integer("num_global_key_value_heads", 1, num_heads, default=narrow.num_kv_heads)
        wide = structs.replace(wide, num_kv_heads=number)
    heads = tuple(narrow if has_window else wide for has_window in windowed)
    name = "per_layer_config"
    if fields.get(name) is None:
        return heads
    given = fields.get(name)
    if not isinstance(given, Mapping):
        raise fields.error(name, given, "expected an object with one object for each layer that differs")
    listed = [narrow] * len(windowed)
    for layer, differs in given.items():
        where = Fields(fields.path, differs if isinstance(differs, Mapping) else {}, f"{name}.{layer}.")
        if not str(layer).isdecimal() or int(layer) >= len(windowed) or not isinstance(differs, Mapping):
            raise fields.error(name, given, "expected the numbers of layers, with an object for each")
        if unknown := set(differs) - {"head_dim", "num_key_value_heads"}:
            raise where.error(min(unknown), differs[min(unknown)], "which cannot differ between layers")
        listed[int(layer)] = LayerHeads(
            head_dim=where.integer("head_dim", 1, 1 << 12, default=narrow.head_dim),
            num_kv_heads=where.integer("num_key_value_heads", 1, num_heads, default=narrow.num_kv_heads),
        )
    for kind in (False, True):
        alike = {one for one, has_window in zip(listed, windowed, strict=True) if has_window == kind}
        if len(alike) > 1:
            raise fields.error(name, given, "expected the same heads in all layers of a kind (layer_types)")
    own = [key for key in ("global_head_dim", "num_global_key_value_heads") if fields.get(key) is not None]
    if own and tuple(listed) != heads:
        raise fields.error(name, given, f"but {own[0]} is {fields.get(own[0])}; remove one of them")
    return tuple(listed)


def _gemma3n(fields: Fields) -> Facts:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    windowed = _windows(fields, num_layers, _PATTERN["gemma3n"])
    sources = _sources(fields, windowed, default=15)
    rope, local_theta = read_two_ropes(fields, 1_000_000.0, "rope_local_base_freq", 10_000.0)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    streams = fields.integer("altup_num_inputs", 2, 16, default=4)
    fields.number("altup_coef_clip", 0.0, 1e30, default=120.0)  # in training only
    return rope_facts(fields, rope) | {
        **_common(fields, windowed, sources, window=512, cap=30.0),
        **_widths(fields, num_layers),
        "num_kv_heads": fields.integer("num_key_value_heads", 1, num_heads, default=min(2, num_heads)),
        "local_rope_theta": local_theta,
        "layer_inputs": LayerInputsSpec(
            size=fields.integer("hidden_size_per_layer_input", 1, 1 << 16, default=_LAYER_INPUT),
            vocab_size=fields.integer("vocab_size_per_layer_input", 1, 1 << 24, default=_TABLE_ROWS),
        ),
        "altup": AltUpSpec(
            num_streams=streams,
            active=fields.integer("altup_active_idx", 0, streams - 1, default=0),
            scales_output=fields.boolean("altup_correct_scale", default=True),
            laurel_rank=fields.integer("laurel_rank", 1, 1 << 16, default=64),
        ),
        "sparsity": _sparsity(fields, num_layers),
    }


def _widths(fields: Fields, num_layers: int) -> Facts:
    name = "intermediate_size"
    if not isinstance(fields.get(name), list):
        return {}
    widths = fields.integers(name, 1, 1 << 22)
    if len(widths) != num_layers:
        raise fields.error(name, list(widths), f"expected one number for each of {num_layers} layers")
    return {"intermediate_size": max(widths), "intermediate_sizes": widths}


def _sparsity(fields: Fields, num_layers: int) -> tuple[float, ...]:
    name = "activation_sparsity_pattern"
    value = fields.get(name)
    if value is None:
        num_sparse = 10 if num_layers > 10 else 0
        return (0.95,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    if (
        not isinstance(value, list)
        or len(value) != num_layers
        or any(isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < 1 for one in value)
    ):
        raise fields.error(
            name, value, f"expected a number from 0 to below 1 for each of {num_layers} layers"
        )
    return tuple(float(one) for one in value)


def _common(
    fields: Fields, windowed: tuple[bool, ...], sources: tuple[int, ...], *, window: int, cap: float | None
) -> Facts:
    """What Gemma 3n and Gemma 4 have in common; `window`, `cap`: the defaults."""
    for name in ("attn_logit_softcapping", "query_rescale_scalar"):
        if fields.get(name) is not None:
            raise fields.error(name, fields.get(name), "which these models do not have; remove the field")
    bias = fields.boolean("attention_bias", default=False)
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "query_scale": 1.0,
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS, default=window),
        "windowed_layers": windowed,
        "kv_sources": sources,
        "form": structs.replace(
            FOUR_NORMS, logits_cap=cap_of(fields, "final_logit_softcapping", cap), value_norm=True
        ),
    }


def _windows(fields: Fields, num_layers: int, pattern: int) -> tuple[bool, ...]:
    if fields.get("layer_types") is None:
        return windows_by_pattern(pattern, num_layers)
    windowed = layer_types(fields)
    if len(windowed) != num_layers:
        raise fields.error(
            "layer_types", fields.get("layer_types"), f"expected one for each of {num_layers} layers"
        )
    return windowed


def _sources(fields: Fields, windowed: tuple[bool, ...], default: int) -> tuple[int, ...]:
    name = "num_kv_shared_layers"
    return kv_sources(fields, name, fields.integer(name, 0, 1 << 12, default=default), windowed)


def kv_sources(fields: Fields, name: str, shared: int, windowed: tuple[bool, ...]) -> tuple[int, ...]:
    """The source of each layer's keys and values; empty: all have their own.

    The last layers attend to those of the last layer of their kind that has its own.

    Args:
        name: of the field with the number of these layers.
        shared: the number.
    """
    if shared == 0:
        return ()
    num_layers = len(windowed)
    first = num_layers - shared
    last_of = {windowed[layer]: layer for layer in range(max(first, 0))}
    if set(last_of) != set(windowed):
        raise fields.error(
            name, shared, "each kind of layer, with a window or without, must occur before these layers"
        )
    return (*range(first), *(last_of[windowed[layer]] for layer in range(first, num_layers)))


_ACTIVATION: Final = "gelu_pytorch_tanh"

FAMILIES: Final[dict[str, Family]] = {
    "gemma4_text": Family(
        "Gemma4ForCausalLM", _gemma4, activation=_ACTIVATION, tied=True, head_dim=256, body="Gemma4TextModel"
    ),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedForCausalLM",
        _gemma4_unified,
        activation=_ACTIVATION,
        tied=True,
        head_dim=256,
        body="Gemma4UnifiedTextModel",
    ),
    "gemma3n_text": Family(
        "Gemma3nForCausalLM",
        _gemma3n,
        activation=_ACTIVATION,
        tied=True,
        head_dim=256,
        body="Gemma3nTextModel",
    ),
}
