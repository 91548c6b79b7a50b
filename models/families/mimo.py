"""MiMo-V2-Flash: windowed layers with sinks and twice the KV heads, small heads of v, experts after the first layers.

Files of the maker have lists of numbers for the kinds of layers, those of transformers have lists of names. GGUF files
have the maker's numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import ExpertNames, Routing
from ..spec.layer_form import AttentionForm, Biases, LayerForm, LayerHeads, ModuleNames, WindowsSpec
from ..spec.model_spec import FilesSpec
from ..spec.streams_spec import StreamsSpec
from .deepseek import experts_after, sigmoid_routing
from .family import GGUF, Facts, Family
from .gguf_readers import as_list, mixture_of, windowed_layers
from .hf_readers import layer_types, partial_rope_facts
from .hf_rope import MAX_POSITIONS, read_two_ropes

if TYPE_CHECKING:
    from ..gguf.gguf_file import GGUFFile

_ONLY: Final = {
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_projection_layout": "split",
    "hybrid_block_size": None,
}
"""Fields with the only value that is supported; they may be missing."""
_SAME: Final = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}
"""Fields of windowed layers that must be those of the others."""


_FORM: Final = LayerForm(names=ModuleNames(mtp="model.mtp."))


def _mimo_v2_flash(fields: Fields) -> Facts:
    for name, only in _ONLY.items():
        if fields.get(name) not in (None, only):
            raise fields.error(name, fields.get(name), f"only {only} is supported")
    for name, other in _SAME.items():
        if fields.get(name) not in (None, fields.get(other)):
            raise fields.error(name, fields.get(name), f"expected {other}, {fields.get(other)}")
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    head_dim = fields.integer("head_dim", 1, 1 << 12, default=192)
    num_kv = fields.integer("num_key_value_heads", 1, num_heads, default=min(4, num_heads))
    num_windowed_kv = fields.integer(
        "swa_num_key_value_heads", 1, num_heads, default=min(2 * num_kv, num_heads)
    )
    windowed = _windowed(fields, num_layers)
    heads = tuple(
        LayerHeads(head_dim=head_dim, num_kv_heads=num_windowed_kv if has_window else num_kv)
        for has_window in windowed
    )
    rope, local_theta = read_two_ropes(fields, 5e6, "swa_rope_theta", 1e4, kinds=("default",))
    dense = [layer for layer, is_sparse in enumerate(_sparse(fields, num_layers)) if not is_sparse]
    routing = partial(sigmoid_routing, num_groups=1, num_active_groups=1, scale=1.0)
    bias = fields.boolean("attention_bias", default=False)
    value_dim = fields.integer("v_head_dim", 1, head_dim, default=min(128, head_dim))
    missing = 1.0 if "attention_value_scale" in fields else 0.707
    return partial_rope_facts(fields, rope, head_dim) | {
        "head_dim": head_dim,
        "num_kv_heads": heads[0].num_kv_heads,
        "biases": Biases(qkv=bias),
        "form": _FORM,
        "streams": StreamsSpec(layer_heads=heads),
        "windows": WindowsSpec(size=_window(fields), layers=windowed, rope_theta=local_theta),
        "attention": _attention(
            value_dim, fields.number("attention_value_scale", 1e-6, 1e6, default=missing)
        ),
        **experts_after(fields, dense, routing, num_shared=0),
    }


def _attention(value_dim: int, value_scale: float) -> AttentionForm:
    return AttentionForm(sinks=True, window_sinks=True, value_dim=value_dim, value_scale=value_scale)


def _window(fields: Fields) -> int:
    """The query's own token and `sliding_window_size` before it; transformers writes the sum, `sliding_window`."""
    if fields.get("sliding_window_size") is not None:
        return fields.integer("sliding_window_size", 1, MAX_POSITIONS) + 1
    return fields.integer("sliding_window", 1, MAX_POSITIONS, default=129)


def _windowed(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    name = "hybrid_layer_pattern"
    if fields.get(name) is None and fields.get("layer_types") is not None:
        return layer_types(fields)
    if fields.get(name) is None:
        return tuple(layer > 0 and (layer + 1) % 6 != 0 for layer in range(num_layers))
    return _flags(fields, name, num_layers)


def _sparse(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    name, kinds = "mlp_layer_types", fields.get("mlp_layer_types")
    if kinds is None and fields.get("moe_layer_freq") is not None:
        return _flags(fields, "moe_layer_freq", num_layers)
    if kinds is None:
        return (False, *(True,) * (num_layers - 1))
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise fields.error(name, kinds, f"expected dense or sparse for each of the {num_layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def _flags(fields: Fields, name: str, num_layers: int) -> tuple[bool, ...]:
    """A list of 0 and 1."""
    numbers = fields.integers(name, 0, 1)
    if len(numbers) != num_layers:
        raise fields.error(name, fields.get(name), f"expected 0 or 1 for each of the {num_layers} layers")
    return tuple(map(bool, numbers))


def _mimo2(fields: Fields, arch: str) -> Facts:
    """Layers that predict further tokens count as blocks of the file, also in its lists."""
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    num_layers = fields.integer(f"{arch}.block_count", further + 1, 1 << 12) - further
    num_heads = fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    head_dim = fields.integer(f"{arch}.attention.key_length", 1, 1 << 12)
    key = f"{arch}.attention.head_count_kv"
    numbers = as_list(fields.get(key))
    if not isinstance(numbers, list) or any(not 1 <= number <= num_heads for number in numbers):
        raise fields.error(key, numbers, f"expected a number from 1 to {num_heads} for each layer")
    heads = tuple(LayerHeads(head_dim=head_dim, num_kv_heads=number) for number in numbers[:num_layers])
    rotary_dim = fields.integer(f"{arch}.rope.dimension_count", 1, head_dim, default=head_dim)
    experts = mixture_of(fields, arch, ExpertNames())
    routing = Routing(
        num_active=experts.num_active,
        scores="sigmoid",
        has_bias=True,
        group_best=2,
        scale=fields.number(f"{arch}.expert_weights_scale", 0.0, 1e6, default=1.0) or 1.0,
        float32_logits=True,
    )
    return {
        "num_layers": num_layers,
        "head_dim": head_dim,
        "num_kv_heads": heads[0].num_kv_heads,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "files": FilesSpec(num_mtp_layers=further),
        "form": _FORM,
        "streams": StreamsSpec(layer_heads=heads),
        "windows": WindowsSpec(
            size=fields.integer(f"{arch}.attention.sliding_window", 1, MAX_POSITIONS) + 1,  # see `_window`
            layers=windowed_layers(fields, arch, 6)[:num_layers],
            rope_theta=fields.number(f"{arch}.rope.freq_base_swa", 1.0, 1e15, default=1e4),
        ),
        "attention": _attention(
            fields.integer(f"{arch}.attention.value_length", 1, head_dim, default=head_dim),
            fields.number(f"{arch}.attention.value_scale", 1e-6, 1e6, default=1.0),
        ),
        "experts": structs.replace(experts, routing=routing),
    }


def _of_mimo2_tensors(file: GGUFFile, facts: Facts) -> Facts:
    """Layers without a router have a dense MLP."""
    dense = [n for n in range(facts["num_layers"]) if f"blk.{n}.ffn_gate_inp.weight" not in file.tensors]
    return facts | {"experts": structs.replace(facts["experts"], dense_layers=tuple(dense))}


FAMILIES: Final = (
    Family(
        "mimo_v2_flash",
        structure="llama",
        published="MiMo-V2-Flash",
        architecture="MiMoV2FlashForCausalLM",
        read=_mimo_v2_flash,
        head_dim=192,
        norm_eps="rms_norm_eps",
        renamed={"layernorm_epsilon": "rms_norm_eps"},
        defaults={"partial_rotary_factor": 0.334},
        tensors={r"\.attention_sink_bias$": ".sinks"},
        gguf={
            "mimo2": GGUF(_mimo2, has_experts=True, has_own_heads=True, of_tensors=_of_mimo2_tensors),
        },
    ),
)
