"""Gemma 3n and Gemma 4: inputs of layers, layers that attend to keys and values of others, heads of two sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import GEMMA_NAMES, ExpertsSpec, Routing
from ..spec.layer_form import (
    FOUR_NORMS,
    AttentionForm,
    Biases,
    LayerForm,
    LayerHeads,
    RopeScaling,
    WindowsSpec,
)
from ..spec.streams_spec import AltUpSpec, LayerInputsSpec, StreamsSpec
from .family import GGUF, LAYER_NAMES, QK_NORM_NAMES, Facts, Family
from .gemma import cap_of
from .gguf_readers import as_list, mixture_of, windowed_layers
from .hf_readers import layer_types, rope_facts, windows_by_pattern
from .hf_rope import KINDS, MAX_POSITIONS, PROPORTIONAL, Rope, read_two_ropes

if TYPE_CHECKING:
    from ..gguf.gguf_file import GGUFFile

_PATTERN: Final = {"gemma4": 6, "gemma3n": 5}
"""One layer in so many has no window, the last of them, if the file does not list the layers."""
_UNSCALED: Final = AttentionForm(query_scale=1.0)
_TABLE_ROWS: Final = 262_144
_LAYER_INPUT: Final = 256
_WIDE_HEAD: Final = 512
_OF_IMAGES: Final = "vision"
_EXPERT_NORMS: Final = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
"""Norms after the MLP that is beside experts, before and after the experts."""


def _gemma4(fields: Fields) -> Facts:
    inputs = fields.integer("hidden_size_per_layer_input", 0, 1 << 16, default=_LAYER_INPUT)
    facts = _gemma4_layers(fields, window=512)
    if fields.boolean("enable_moe_block", default=False):
        facts |= _experts_beside(fields, facts)
    if not inputs:
        return facts
    rows = fields.integer("vocab_size_per_layer_input", 1, 1 << 24, default=_TABLE_ROWS)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    if rows < vocab_size:
        raise fields.error(
            "vocab_size_per_layer_input", rows, f"expected at least vocab_size, which is {vocab_size}"
        )
    return _with_streams(facts, layer_inputs=LayerInputsSpec(size=inputs, vocab_size=rows))


def _experts_beside(fields: Fields, facts: Facts) -> Facts:
    """Experts beside the dense MLP of each layer; the MLP counts as their shared expert."""
    if facts["streams"].intermediate_sizes:
        raise fields.error("use_double_wide_mlp", True, "only false is supported for a model with experts")
    return _beside(
        facts,
        ExpertsSpec(
            num_experts=fields.integer("num_experts", 1, 1 << 16),
            intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22),
            routing=Routing(num_active=fields.integer("top_k_experts", 1, 1 << 16)),
            names=GEMMA_NAMES,
        ),
        fields.integer("intermediate_size", 1, 1 << 21),
    )


def _beside(facts: Facts, experts: ExpertsSpec, width: int) -> Facts:
    """The facts of all models with experts beside an MLP of this width."""
    return {
        "experts": structs.replace(experts, shared_size=width, activation="gelu_tanh", has_scales=True),
        "form": structs.replace(facts["form"], norms=(*FOUR_NORMS.norms, *_EXPERT_NORMS)),
    }


def _gemma4_unified(fields: Fields) -> Facts:
    for name in ("hidden_size_per_layer_input", "enable_moe_block"):
        if fields.get(name):
            raise fields.error(name, fields.get(name), "this kind of model has none; set it to 0")
    return _gemma4_layers(fields, window=1024)


def _gemma4_layers(fields: Fields, window: int) -> Facts:
    """Facts that both kinds have; `window`: the default."""
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
    facts = _common(fields, windowed, sources, local_theta, window=window, cap=None)
    facts = _with_streams(facts, layer_heads=heads)
    if fields.boolean("use_double_wide_mlp", default=False) and sources:
        shares = [source != layer for layer, source in enumerate(sources)]
        widths = tuple(width * (1 + wide) for wide in shares)
        facts = _with_streams(facts, intermediate_sizes=widths) | {"intermediate_size": max(widths)}
    form = facts["form"]
    assert isinstance(form, LayerForm)
    return rope_facts(fields, rope) | {
        **facts,
        "form": structs.replace(
            form, full_keys_are_values=fields.boolean("attention_k_eq_v", default=False), layer_scalars=True
        ),
        "head_dim": narrow.head_dim,
        "num_kv_heads": narrow.num_kv_heads,
    }


def _gemma4_ropes(fields: Fields) -> tuple[Rope, float]:
    """Rope of the layers without a window, and the base of the others."""
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
    widths = _widths(fields, num_layers)
    facts = _with_streams(
        _common(fields, windowed, sources, local_theta, window=512, cap=30.0),
        intermediate_sizes=widths,
        layer_inputs=LayerInputsSpec(
            size=fields.integer("hidden_size_per_layer_input", 1, 1 << 16, default=_LAYER_INPUT),
            vocab_size=fields.integer("vocab_size_per_layer_input", 1, 1 << 24, default=_TABLE_ROWS),
        ),
        altup=AltUpSpec(
            num_streams=streams,
            active=fields.integer("altup_active_idx", 0, streams - 1, default=0),
            scales_output=fields.boolean("altup_correct_scale", default=True),
            laurel_rank=fields.integer("laurel_rank", 1, 1 << 16, default=64),
        ),
        sparsity=_sparsity(fields, num_layers),
    )
    if widths:
        facts["intermediate_size"] = max(widths)
    return rope_facts(fields, rope) | {
        **facts,
        "num_kv_heads": fields.integer("num_key_value_heads", 1, num_heads, default=min(2, num_heads)),
    }


def _with_streams(facts: Facts, **changed: object) -> Facts:
    """These facts with other values in `streams`."""
    return facts | {"streams": structs.replace(facts["streams"], **changed)}


def _widths(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The widths of the MLPs of all layers; empty: one number, of all layers."""
    name = "intermediate_size"
    if not isinstance(fields.get(name), list):
        return ()
    widths = fields.integers(name, 1, 1 << 22)
    if len(widths) != num_layers:
        raise fields.error(name, list(widths), f"expected one number for each of {num_layers} layers")
    return widths


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
    fields: Fields,
    windowed: tuple[bool, ...],
    sources: tuple[int, ...],
    local_theta: float,
    *,
    window: int,
    cap: float | None,
) -> Facts:
    """Facts that Gemma 3n and Gemma 4 share; `window`, `cap`: the defaults."""
    for name in ("attn_logit_softcapping", "query_rescale_scalar"):
        if fields.get(name) is not None:
            raise fields.error(name, fields.get(name), "which these models do not have; remove the field")
    bias = fields.boolean("attention_bias", default=False)
    return {
        "biases": Biases(qkv=bias, attention_out=bias),
        "attention": _UNSCALED,
        "windows": WindowsSpec(
            size=fields.integer("sliding_window", 1, MAX_POSITIONS, default=window),
            layers=windowed,
            rope_theta=local_theta,
        ),
        "streams": StreamsSpec(kv_sources=sources),
        "form": structs.replace(
            FOUR_NORMS,
            qk_norm=True,
            logits_cap=cap_of(fields, "final_logit_softcapping", cap),
            value_norm=True,
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


_TABLE: Final = "per_layer_token_embd.weight"
_FULL_KV_LAYERS: Final = 20
"""Layers of Gemma 3n with keys and values of their own, in files that do not say how many share."""
_SPARSITY: Final = 0.95
_NUM_SPARSE: Final = 10
"""What the first layers of Gemma 3n have, in files that do not say."""


def _gemma4_gguf(fields: Fields, arch: str) -> Facts:
    windowed = windowed_layers(fields, arch, 6)
    heads = _heads_gguf(fields, arch, windowed)
    narrow = heads[windowed.index(True) if any(windowed) else 0]
    shared = fields.integer(f"{arch}.attention.shared_kv_layers", 0, 1 << 12, default=0)
    facts = {
        **_with_streams(_common_gguf(fields, arch, windowed, shared, cap=0.0), layer_heads=heads),
        "head_dim": narrow.head_dim,
        "num_kv_heads": narrow.num_kv_heads,
    }
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0):
        width = fields.integer(f"{arch}.feed_forward_length", 1, 1 << 21)
        facts |= _beside(facts, mixture_of(fields, arch, GEMMA_NAMES), width)
    return facts


def _heads_gguf(fields: Fields, arch: str, windowed: tuple[bool, ...]) -> tuple[LayerHeads, ...]:
    """The keys without `_swa` are of the layers without a window; heads of keys are a number, or one for each layer."""
    key = f"{arch}.attention.head_count_kv"
    num_heads = fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    numbers = _numbers(fields, key, len(windowed)) or (fields.integer(key, 1, num_heads),) * len(windowed)
    if any(not 1 <= number <= num_heads for number in numbers):
        raise fields.error(key, list(numbers), f"expected numbers from 1 to {num_heads}")
    sizes = []
    for end in ("", "_swa"):
        size = fields.integer(f"{arch}.attention.key_length{end}", 1, 1 << 12)
        for other in (f"{arch}.attention.value_length{end}", f"{arch}.rope.dimension_count{end}"):
            if fields.integer(other, 1, 1 << 12, default=size) != size:
                raise fields.error(other, fields.get(other), f"expected the head size {size}")
        sizes.append(size)
    heads = tuple(
        LayerHeads(head_dim=sizes[has_window], num_kv_heads=int(number))
        for has_window, number in zip(windowed, numbers, strict=True)
    )
    if len(set(zip(heads, windowed, strict=True))) > 2:
        raise fields.error(key, list(numbers), "expected the same number in all layers of a kind")
    return heads


def _of_gemma4_tensors(file: GGUFFile, facts: Facts) -> Facts:
    """Facts that only tensors show: whether layers without a window have values of their own, and how they rotate."""
    from .gguf_rope import read_proportional  # needs numpy

    streams, windowed = facts["streams"], facts["windows"].layers
    sources = streams.kv_sources
    full = [n for n, has_window in enumerate(windowed) if not has_window and (not sources or sources[n] == n)]
    without = [n for n in full if f"blk.{n}.attn_v.weight" not in file.tensors]
    if full and without == full:
        facts["form"] = structs.replace(facts["form"], full_keys_are_values=True)
    size = streams.layer_heads[full[0]].head_dim if full else facts["head_dim"]
    return _with_table_rows(file, facts | {"rope_scaling": read_proportional(file, size)})


def _gemma3n_gguf(fields: Fields, arch: str) -> Facts:
    windowed = windowed_layers(fields, arch, 5)
    num_layers = len(windowed)
    shared = fields.integer(
        f"{arch}.attention.shared_kv_layers", 0, 1 << 12, default=max(num_layers - _FULL_KV_LAYERS, 0)
    )
    num_heads = fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    streams = fields.integer(f"{arch}.altup.num_inputs", 2, 16, default=4)
    sparsity = _numbers(fields, f"{arch}.activation_sparsity_scale", num_layers)
    facts = _with_streams(
        _common_gguf(fields, arch, windowed, shared, cap=30.0),
        altup=AltUpSpec(
            num_streams=streams,
            active=fields.integer(f"{arch}.altup.active_idx", 0, streams - 1, default=0),
            scales_output=True,
            laurel_rank=1,  # until the tensors are seen
        ),
        # The file has standard deviations above the mean.
        sparsity=tuple(0.0 if math.isinf(each) else NormalDist().cdf(each) for each in sparsity)
        or (_SPARSITY,) * min(_NUM_SPARSE, num_layers) + (0.0,) * max(num_layers - _NUM_SPARSE, 0),
    )
    return facts | {"num_kv_heads": fields.integer(f"{arch}.attention.head_count_kv", 1, num_heads)}


def _of_gemma3n_tensors(file: GGUFFile, facts: Facts) -> Facts:
    info = file.tensors.get("blk.0.laurel_l.weight")
    rank = info.shape[0] if info is not None else 1
    facts = _with_streams(facts, altup=structs.replace(facts["streams"].altup, laurel_rank=rank))
    return _with_table_rows(file, facts)


def _with_table_rows(file: GGUFFile, facts: Facts) -> Facts:
    """The table of the layers' inputs has as many rows as the file says; padding is included."""
    info, inputs = file.tensors.get(_TABLE), facts["streams"].layer_inputs
    if info is None or inputs is None:
        return facts
    return _with_streams(facts, layer_inputs=structs.replace(inputs, vocab_size=info.shape[0]))


def _common_gguf(fields: Fields, arch: str, windowed: tuple[bool, ...], shared: int, *, cap: float) -> Facts:
    """`cap`: of logits, the default; 0: there is none."""
    key = f"{arch}.attn_logit_softcapping"
    if fields.number(key, 0.0, 1e9, default=0.0):
        raise fields.error(key, fields.get(key), "scores of these models are not capped")
    cap = fields.number(f"{arch}.final_logit_softcapping", 0.0, 1e6, default=cap)
    size = fields.integer(f"{arch}.embedding_length_per_layer_input", 0, 1 << 16, default=0)
    widths = tuple(int(each) for each in _numbers(fields, f"{arch}.feed_forward_length", len(windowed)))
    if any(width < 1 for width in widths):
        raise fields.error(f"{arch}.feed_forward_length", list(widths), "expected numbers above 0")
    facts: Facts = {"intermediate_size": max(widths)} if widths else {}
    return facts | {
        "attention": _UNSCALED,
        "windows": WindowsSpec(
            size=fields.integer(f"{arch}.attention.sliding_window", 1, 1 << 30),
            layers=windowed,
            rope_theta=fields.number(f"{arch}.rope.freq_base_swa", 1.0, 1e15, default=10000.0),
        ),
        "streams": StreamsSpec(
            intermediate_sizes=widths if len(set(widths)) > 1 else (),
            kv_sources=kv_sources(fields, f"{arch}.attention.shared_kv_layers", shared, windowed),
            layer_inputs=LayerInputsSpec(size=size, vocab_size=1) if size else None,
        ),
        "form": structs.replace(
            FOUR_NORMS, qk_norm=True, logits_cap=cap or None, value_norm=True, layer_scalars=arch == "gemma4"
        ),
    }


def _numbers(fields: Fields, key: str, num_layers: int) -> tuple[float, ...]:
    """A number for each layer; empty: the file has none, or one for all."""
    value = fields.get(key)
    numbers = as_list(value)
    if not isinstance(numbers, list):
        return ()
    if len(numbers) < num_layers or any(isinstance(one, str) or math.isnan(one) for one in numbers):
        raise fields.error(key, numbers, f"expected a number for each of {num_layers} layers")
    return tuple(numbers[:num_layers])


_GEMMA4_NAMES: Final = {
    **LAYER_NAMES,
    **QK_NORM_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_GEMMA3N_NAMES: Final = {
    **_GEMMA4_NAMES,
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}


FAMILIES: Final = (
    Family(
        "gemma4_text",
        structure="streams",
        published="Gemma 4 E2B, E4B, 31B, 26B-A4B",
        architecture="Gemma4ForCausalLM",
        read=_gemma4,
        activation=_ACTIVATION,
        tied=True,
        head_dim=256,
        body="Gemma4TextModel",
        tensors={r"(layers\.\d+\.)(experts|router)\.": r"\1moe.\2."},
        gguf={
            "gemma4": GGUF(
                _gemma4_gguf,
                _GEMMA4_NAMES,
                has_experts=True,
                has_own_heads=True,
                of_tensors=_of_gemma4_tensors,
            )
        },
    ),
    Family(
        "gemma4_unified_text",
        structure="streams",
        published="Gemma 4 12B",
        architecture="Gemma4UnifiedForCausalLM",
        read=_gemma4_unified,
        activation=_ACTIVATION,
        tied=True,
        head_dim=256,
        body="Gemma4UnifiedTextModel",
    ),
    Family(
        "gemma3n_text",
        structure="streams",
        published="Gemma 3n E2B, E4B",
        architecture="Gemma3nForCausalLM",
        read=_gemma3n,
        activation=_ACTIVATION,
        tied=True,
        head_dim=256,
        body="Gemma3nTextModel",
        gguf={"gemma3n": GGUF(_gemma3n_gguf, _GEMMA3N_NAMES, of_tensors=_of_gemma3n_tensors)},
    ),
)
