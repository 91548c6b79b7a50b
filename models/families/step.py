"""Step-3.5 and Step-3.7: experts, gates of heads, and windows, with more query heads and another rope in them.

Published files have a number for each layer, also for those after the last, which predict further tokens; transformers
writes the same by kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from ..fields import Fields
from ..gguf.gguf_file import GGUFFile
from ..spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import AttentionForm, Biases, LayerForm, LayerHeads, RopeScaling, WindowsSpec
from ..spec.model_spec import FilesSpec
from ..spec.streams_spec import StreamsSpec
from .family import GGUF, LAYER_NAMES, QK_NORM_NAMES, Facts, Family
from .gguf_readers import as_list, mixture_of, windowed_layers
from .hf_readers import head_dim_of
from .hf_rope import MAX_POSITIONS, Rope, read_one_rope

_ONLY: Final = {
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "use_bidirectional_attention": False,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "zero_centered": True,
}
_KINDS: Final = ("full_attention", "sliding_attention")
_OTHER: Final = "attention_other_setting"
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")
_HEAD_DIM: Final = 128
_FIRST_SPARSE: Final = 3
_SIGMOID: Final = 2
_MOST_LIMIT: Final = 1e6
_FORM: Final = LayerForm(norm="offset_rms", float32_norms=True, qk_norm=True)


def _step3p5(fields: Fields) -> Facts:
    for name, only in _ONLY.items():
        if fields.get(name) not in (None, only):
            raise fields.error(name, fields.get(name), f"only {only!r} is supported")
    if not all(_of_layers(fields, "use_rope_layers", True)):
        raise fields.error("use_rope_layers", fields.get("use_rope_layers"), "all layers must rotate")
    windowed = _windowed(fields)
    head_dim = head_dim_of(fields, _HEAD_DIM)
    full, local = (_rope(fields, windowed, has_window=has_window) for has_window in (False, True))
    if any(windowed) and local.scaling != RopeScaling():
        rule = f"windowed layers must not be scaled; set yarn_only_types to {list(_KINDS[:1])}"
        raise fields.error("rope_scaling", fields.get("rope_scaling"), rule)
    rotary_dims = _rotary_dims(head_dim, full, local)
    if min(rotary_dims) == 0:
        factors = full.partial_factor, local.partial_factor
        raise fields.error("partial_rotary_factors", factors, "a part of each head must rotate")
    bias = fields.boolean("attention_bias", default=False)
    attention = AttentionForm(head_gates=fields.boolean("use_head_wise_attn_gate", default=True))
    if fields.get("query_pre_attn_scalar") is not None:
        scale = fields.number("query_pre_attn_scalar", 1e-6, 1e6) ** -0.5
        attention = structs.replace(attention, query_scale=scale)
    window = fields.integer("sliding_window", 1, MAX_POSITIONS) if any(windowed) else 0
    return {
        **_layers(windowed, window, (full.theta, local.theta), rotary_dims),
        "head_dim": head_dim,
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "biases": Biases(qkv=bias, attention_out=bias, mlp=fields.boolean("mlp_bias", default=False)),
        "form": _FORM,
        "attention": attention,
        "streams": StreamsSpec(layer_heads=_heads(fields, head_dim, windowed)),
        "experts": _experts(fields),
        "files": FilesSpec(num_mtp_layers=fields.integer("num_nextn_predict_layers", 0, 1 << 8, default=0)),
    }


def _layers(
    windowed: tuple[bool, ...], window: int, thetas: tuple[float, float], rotary_dims: tuple[int, int]
) -> Facts:
    """The rotating part of heads and the windows; numbers of both kinds of layers are those of `_KINDS`."""
    windows = WindowsSpec(size=window, layers=windowed, rope_theta=thetas[1], rotary_dim=rotary_dims[1])
    return {"rotary_dim": rotary_dims[0], "windows": windows if any(windowed) else None}


def _rotary_dims(head_dim: int, full: Rope, local: Rope) -> tuple[int, int]:
    return int(head_dim * full.partial_factor), int(head_dim * local.partial_factor)


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", 1, 1 << 12)


def _of_layers(fields: Fields, name: str, missing: object) -> list[object]:
    """The entries of the model's layers; `missing`: of a file without the list."""
    num_layers, values = _num_layers(fields), fields.get(name)
    if values is None or values == []:
        return [missing] * num_layers
    if not isinstance(values, list) or len(values) < num_layers:
        raise fields.error(name, values, f"expected a list with one for each of the {num_layers} layers")
    return values[:num_layers]


def _windowed(fields: Fields) -> tuple[bool, ...]:
    kinds = _of_layers(fields, "layer_types", _KINDS[0])
    if any(kind not in _KINDS for kind in kinds):
        rule = f"expected {' or '.join(_KINDS)} for each layer"
        raise fields.error("layer_types", fields.get("layer_types"), rule)
    return tuple(kind == _KINDS[1] for kind in kinds)


def _rope(fields: Fields, windowed: tuple[bool, ...], *, has_window: bool) -> Rope:
    """The rope of the layers with windows, or of those without; of the others if there are none."""
    has_window = has_window if has_window in windowed else not has_window
    kind = _KINDS[has_window]
    beside = {
        name: fields.get(name) for name in fields if name not in ("rope_theta", "partial_rotary_factor")
    }
    common = Fields(fields.path, beside)
    by_kind = fields.get("rope_parameters")
    if by_kind:
        values = by_kind.get(kind) if isinstance(by_kind, Mapping) else None
        if not isinstance(values, Mapping):
            raise fields.error("rope_parameters", by_kind, f"expected an object with one for {kind}")
        rope = Fields(fields.path, values, prefix=f"rope_parameters.{kind}.")
        return read_one_rope(common, rope, 1e4, _ROPE_KINDS)
    scaling = fields.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise fields.error("rope_scaling", scaling, "expected an object or null")
    scaled = fields.get("yarn_only_types") or _KINDS
    if not isinstance(scaled, list | tuple) or any(each not in _KINDS for each in scaled):
        raise fields.error("yarn_only_types", scaled, f"expected a list of {' and '.join(_KINDS)}")
    values = dict(scaling) if kind in scaled else {}
    for own, name in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factors")):
        values[own] = _of_kind(fields, name, windowed, has_window=has_window)
    return read_one_rope(common, Fields(fields.path, values, prefix="rope_scaling."), 1e4, _ROPE_KINDS)


def _of_kind(fields: Fields, name: str, windowed: tuple[bool, ...], *, has_window: bool) -> object | None:
    """The one value that a list has for all layers of a kind; a single value is that of all layers."""
    values = fields.get(name)
    if not isinstance(values, list):
        return values
    found = {
        str(value): value
        for value, of_window in zip(_of_layers(fields, name, None), windowed, strict=True)
        if of_window == has_window
    }
    if len(found) != 1:
        raise fields.error(name, values, f"expected the same for all layers of the kind {_KINDS[has_window]}")
    return next(iter(found.values()))


def _heads(fields: Fields, head_dim: int, windowed: tuple[bool, ...]) -> tuple[LayerHeads, ...]:
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads)
    setting = fields.get(_OTHER) or {}
    if not isinstance(setting, Mapping):
        raise fields.error(_OTHER, setting, "expected an object or null")
    other = Fields(fields.path, setting, prefix=f"{_OTHER}.")
    for name, only in (("attention_type", _KINDS[1]), ("head_dim", head_dim)):
        if other.get(name) not in (None, only):
            raise other.error(name, other.get(name), f"only {only!r} is supported")
    own = other.integer("num_attention_heads", 1, 1 << 12, default=num_heads)
    own = fields.integer("num_sliding_attention_heads", 1, 1 << 12, default=own)
    full = LayerHeads(head_dim=head_dim, num_kv_heads=num_kv_heads)
    local = LayerHeads(
        head_dim=head_dim,
        num_kv_heads=other.integer("num_attention_groups", 1, own, default=num_kv_heads),
        num_heads=own,
    )
    by_layer = fields.get("per_layer_config") or {}
    expected = {str(layer): {"num_attention_heads": own} for layer, each in enumerate(windowed) if each}
    if by_layer and by_layer != expected:
        rule = f"expected num_attention_heads {own} for each layer with a window, and nothing else"
        raise fields.error("per_layer_config", by_layer, rule)
    return tuple(local if has_window else full for has_window in windowed)


def _experts(fields: Fields) -> ExpertsSpec:
    num_layers = _num_layers(fields)
    return ExpertsSpec(
        num_experts=fields.integer("n_routed_experts", 1, 1 << 16, default=288),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22, default=1280),
        routing=Routing(
            num_active=fields.integer("num_experts_per_tok", 1, 1 << 16, default=8),
            scores="sigmoid",
            has_bias=True,
            normalize=fields.boolean("norm_expert_weight", default=True),
            scale=fields.number("moe_router_scaling_factor", 1e-6, 1e6, default=1.0),
            float32_logits=True,
        ),
        dense_layers=tuple(_dense(fields)),
        shared_size=fields.integer("share_expert_dim", 1, 1 << 22, default=1280),
        limits=_limits(fields, "swiglu_limits", num_layers),
        mlp_limits=_limits(fields, "swiglu_limits_shared", num_layers),
    )


def _dense(fields: Fields) -> list[int]:
    name, num_layers = "moe_layers_enum", _num_layers(fields)
    if fields.get("mlp_layer_types") is not None:
        kinds = _of_layers(fields, "mlp_layer_types", None)
        if any(kind not in ("dense", "sparse") for kind in kinds):
            raise fields.error("mlp_layer_types", kinds, "expected dense or sparse for each layer")
        return [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    given = fields.get(name)
    numbers = given.split(",") if isinstance(given, str) else given
    if numbers is None:
        numbers = list(range(_FIRST_SPARSE, num_layers))
    if not isinstance(numbers, list) or not all(str(number).strip().isdigit() for number in numbers):
        raise fields.error(name, given, "expected the numbers of the layers with experts")
    return sorted({*range(num_layers)} - {int(number) for number in numbers})


def _limits(fields: Fields, name: str, num_layers: int) -> tuple[float, ...]:
    """Limits of layers; 0: none. Empty if no layer has one."""
    values = as_list(fields.get(name))
    if values is None or values == []:
        return ()
    if not isinstance(values, list) or len(values) < num_layers or not all(map(_is_limit, values)):
        rule = f"expected a limit above 0 for each layer, or 0 or null, {num_layers} in all"
        raise fields.error(name, values, rule)
    limits = tuple(float(value or 0) for value in values[:num_layers])
    return limits if any(limits) else ()


def _is_limit(value: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value < _MOST_LIMIT)  # type: ignore[operator]


def _step35(fields: Fields, arch: str) -> Facts:
    """llama.cpp halves the rotating part of the layers without a window, which files do not say."""
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    num_layers = fields.integer(f"{arch}.block_count", further + 1, 1 << 12) - further
    head_dim = fields.integer(f"{arch}.attention.key_length", 1, 1 << 12)
    heads = [
        _numbers(fields, f"{arch}.attention.{name}", num_layers) for name in ("head_count", "head_count_kv")
    ]
    windowed = windowed_layers(fields, arch, 4)[:num_layers]
    rotating = fields.integer(f"{arch}.rope.dimension_count", 2, head_dim, default=head_dim)
    local = fields.integer(f"{arch}.rope.dimension_count_swa", 2, head_dim, default=rotating)
    theta = fields.number(f"{arch}.rope.freq_base", 1.0, 1e15, default=1e4)
    thetas = theta, fields.number(f"{arch}.rope.freq_base_swa", 1.0, 1e15, default=theta)
    gating = f"{arch}.expert_gating_func"
    if fields.integer(gating, 0, 1 << 8, default=_SIGMOID) != _SIGMOID:
        raise fields.error(gating, fields.get(gating), f"only {_SIGMOID} (sigmoid) is supported")
    experts = mixture_of(fields, arch, ExpertNames())
    routing = Routing(
        num_active=experts.num_active,
        scores="sigmoid",
        has_bias=True,
        normalize=fields.boolean(f"{arch}.expert_weights_norm", default=False),
        scale=fields.number(f"{arch}.expert_weights_scale", 0.0, 1e6, default=1.0) or 1.0,
        float32_logits=True,
    )
    window = fields.integer(f"{arch}.attention.sliding_window", 1, MAX_POSITIONS)
    return {
        **_layers(windowed, window, thetas, (rotating // 2, local)),
        "num_layers": num_layers,
        "num_heads": max(heads[0]),
        "num_kv_heads": max(heads[1]),
        "head_dim": head_dim,
        "form": _FORM,
        "streams": StreamsSpec(
            layer_heads=tuple(
                LayerHeads(head_dim=head_dim, num_kv_heads=kv, num_heads=q)
                for q, kv in zip(*heads, strict=True)
            )
        ),
        "files": FilesSpec(num_mtp_layers=further),
        "experts": structs.replace(
            experts,
            routing=routing,
            shared_size=fields.integer(f"{arch}.expert_shared_feed_forward_length", 1, 1 << 22),
            limits=_limits(fields, f"{arch}.swiglu_clamp_exp", num_layers),
            mlp_limits=_limits(fields, f"{arch}.swiglu_clamp_shexp", num_layers),
        ),
    }


def _numbers(fields: Fields, key: str, num_layers: int) -> list[int]:
    """A number for each layer, or one for all."""
    values = as_list(fields.get(key))
    if not isinstance(values, list):
        return [fields.integer(key, 1, 1 << 12)] * num_layers
    if len(values) < num_layers or any(type(each) is not int or not 1 <= each <= 1 << 12 for each in values):
        raise fields.error(key, values, f"expected a number for each of {num_layers} layers")
    return values[:num_layers]


def _of_step35_tensors(file: GGUFFile, facts: Facts) -> Facts:
    """Layers without a router have a dense MLP; divisors of frequencies are those of layers without a window."""
    from .gguf_rope import read_divisors

    dense = [n for n in range(facts["num_layers"]) if f"blk.{n}.ffn_gate_inp.weight" not in file.tensors]
    gates = AttentionForm(head_gates="blk.0.attn_gate.weight" in file.tensors)
    return facts | {
        "experts": structs.replace(facts["experts"], dense_layers=tuple(dense)),
        "attention": gates,
        "rope_scaling": read_divisors(file, facts["rotary_dim"], facts["head_dim"]),
    }


FAMILIES: Final = (
    Family(
        "step3p5",
        structure="llama",
        published="Step-3.5-Flash, Step-3.7-Flash",
        architecture="Step3p5ForCausalLM",
        read=_step3p5,
        head_dim=_HEAD_DIM,
        renamed={
            "num_attention_groups": "num_key_value_heads",
            "moe_num_experts": "n_routed_experts",
            "moe_top_k": "num_experts_per_tok",
            "share_expert_dims": "share_expert_dim",
        },
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        tensors={
            r"\.moe\.(gate|up|down)_proj\.": r".mlp.experts.\1_proj.",
            r"\.moe\.(\d+)\.": r".mlp.experts.\1.",
            r"\.moe\.router_bias$": ".mlp.gate.e_score_correction_bias",
            r"\.moe\.experts\.": ".mlp.experts.",
            r"\.moe\.gate\.": ".mlp.gate.",
            r"\.share_expert\.": ".mlp.shared_experts.",
        },
        gguf={
            "step35": GGUF(
                _step35,
                {**LAYER_NAMES, **QK_NORM_NAMES, "self_attn.g_proj": "attn_gate"},
                has_experts=True,
                has_own_heads=True,
                offset_norms=True,
                of_tensors=_of_step35_tensors,
            )
        },
    ),
)
