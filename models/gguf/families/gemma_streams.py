"""Gemma 3n and Gemma 4."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import structs

from ...fields import Fields
from ...hf.families.gemma_streams import kv_sources
from ...spec.attention_form import LayerHeads
from ...spec.layer_form import FOUR_NORMS
from ...spec.stream_spec import AltUpSpec, LayerInputsSpec
from ..gguf_rope import read_proportional
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily, windowed_layers

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

_TABLE: Final = "per_layer_token_embd.weight"
_FULL_KV_LAYERS: Final = 20
"""Layers of Gemma 3n with keys and values of their own, in files that do not say how many share."""
_SPARSITY: Final = 0.95
_NUM_SPARSE: Final = 10
"""What the first layers of Gemma 3n have, in files that do not say."""


def _gemma4(fields: Fields, arch: str) -> Facts:
    windowed = windowed_layers(fields, arch, 6)
    heads = _heads(fields, arch, windowed)
    narrow = heads[windowed.index(True) if any(windowed) else 0]
    shared = fields.integer(f"{arch}.attention.shared_kv_layers", 0, 1 << 12, default=0)
    return {
        **_common(fields, arch, windowed, shared, cap=0.0),
        "head_dim": narrow.head_dim,
        "num_kv_heads": narrow.num_kv_heads,
        "layer_heads": heads,
    }


def _heads(fields: Fields, arch: str, windowed: tuple[bool, ...]) -> tuple[LayerHeads, ...]:
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
    """What only the tensors show: whether layers without a window have values of their own, and how they rotate."""
    sources, windowed, heads = facts["kv_sources"], facts["windowed_layers"], facts["layer_heads"]
    full = [n for n, has_window in enumerate(windowed) if not has_window and (not sources or sources[n] == n)]
    without = [n for n in full if f"blk.{n}.attn_v.weight" not in file.tensors]
    if full and without == full:
        facts["form"] = structs.replace(facts["form"], full_keys_are_values=True)
    size = heads[full[0]].head_dim if full else facts["head_dim"]
    return facts | {"rope_scaling": read_proportional(file, size)} | _table_rows(file, facts)


def _gemma3n(fields: Fields, arch: str) -> Facts:
    windowed = windowed_layers(fields, arch, 5)
    num_layers = len(windowed)
    shared = fields.integer(
        f"{arch}.attention.shared_kv_layers", 0, 1 << 12, default=max(num_layers - _FULL_KV_LAYERS, 0)
    )
    num_heads = fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    streams = fields.integer(f"{arch}.altup.num_inputs", 2, 16, default=4)
    sparsity = _numbers(fields, f"{arch}.activation_sparsity_scale", num_layers)
    return {
        **_common(fields, arch, windowed, shared, cap=30.0),
        "num_kv_heads": fields.integer(f"{arch}.attention.head_count_kv", 1, num_heads),
        "altup": AltUpSpec(
            num_streams=streams,
            active=fields.integer(f"{arch}.altup.active_idx", 0, streams - 1, default=0),
            scales_output=True,
            laurel_rank=1,  # until the tensors are seen
        ),
        # The file has standard deviations above the mean.
        "sparsity": tuple(0.0 if math.isinf(each) else NormalDist().cdf(each) for each in sparsity)
        or (_SPARSITY,) * min(_NUM_SPARSE, num_layers) + (0.0,) * max(num_layers - _NUM_SPARSE, 0),
    }


def _of_gemma3n_tensors(file: GGUFFile, facts: Facts) -> Facts:
    info = file.tensors.get("blk.0.laurel_l.weight")
    rank = info.shape[0] if info is not None else 1
    return facts | {"altup": structs.replace(facts["altup"], laurel_rank=rank)} | _table_rows(file, facts)


def _table_rows(file: GGUFFile, facts: Facts) -> Facts:
    """The table of the layers' inputs has as many rows as the file says; padding is included."""
    info, inputs = file.tensors.get(_TABLE), facts.get("layer_inputs")
    if info is None or inputs is None:
        return {}
    return {"layer_inputs": structs.replace(inputs, vocab_size=info.shape[0])}


def _common(fields: Fields, arch: str, windowed: tuple[bool, ...], shared: int, *, cap: float) -> Facts:
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
    if len(set(widths)) > 1:
        facts["intermediate_sizes"] = widths
    return facts | {
        "qk_norm": True,
        "query_scale": 1.0,
        "sliding_window": fields.integer(f"{arch}.attention.sliding_window", 1, 1 << 30),
        "windowed_layers": windowed,
        "local_rope_theta": fields.number(f"{arch}.rope.freq_base_swa", 1.0, 1e15, default=10000.0),
        "kv_sources": kv_sources(fields, f"{arch}.attention.shared_kv_layers", shared, windowed),
        "layer_inputs": LayerInputsSpec(size=size, vocab_size=1) if size else None,
        "form": structs.replace(
            FOUR_NORMS, logits_cap=cap or None, value_norm=True, layer_scalars=arch == "gemma4"
        ),
    }


def _numbers(fields: Fields, key: str, num_layers: int) -> tuple[float, ...]:
    """A number for each layer; empty: the file has none, or one for all."""
    value = fields.get(key)
    numbers = value.tolist() if isinstance(value, np.ndarray) else value
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

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "gemma4": GGUFFamily(
        "gemma4_text", _gemma4, _GEMMA4_NAMES, has_own_heads=True, of_tensors=_of_gemma4_tensors
    ),
    "gemma3n": GGUFFamily("gemma3n_text", _gemma3n, _GEMMA3N_NAMES, of_tensors=_of_gemma3n_tensors),
}
