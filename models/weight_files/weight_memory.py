"""The memory of a model's weights, from its architecture alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ..gguf.ggml_types import GGML_TYPES
from ..spec.layer_form import KV_UP
from ..spec.quantization import BLOCK_METHODS, unnumbered
from ..spec.streams_spec import LAYER_TABLE
from .needed_tensors import (
    attention_modules,
    delta_projections,
    mamba2_modules,
    modules_beside_layers,
    needed_modules,
    projection_sizes,
    stream_modules,
)
from .vision_tensors import vision_modules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..spec.model_spec import ModelSpec
    from ..spec.state_spec import StateSpec
    from .needed_tensors import Module


class _Linear(NamedTuple):
    """A linear layer that occurs `num` times in a layer of the model: outputs per module name, and number of inputs."""

    rows: dict[str, int]
    columns: int
    num: int = 1


def num_parameters(spec: ModelSpec) -> int:
    """Weights of the model; a tied output head counts once."""
    if spec.files.num_parameters is not None:
        return spec.files.num_parameters
    if spec.encoder is not None:
        return spec.encoder.num_parameters(
            vocab_size=spec.vocab_size,
            size=spec.hidden_size,
            inner=spec.intermediate_size,
            num_layers=spec.num_layers,
            biases=spec.biases,
        )
    num_experts = spec.experts.num_experts if spec.experts is not None else 1
    return sum(
        module.num_parameters * (num_experts if module.is_expert else 1)
        for module in needed_modules(spec, one_expert=True)  # a file may name any number of them
    ) + sum(module.num_parameters for module in vision_modules(spec))


def multiplied_parameters(spec: ModelSpec) -> int:
    """Weights that each token is multiplied with: those of linear layers, and of the experts that compute for it."""
    num_active = spec.experts.routing.num_active if spec.experts is not None else 1
    return sum(
        math.prod(module.shape) * (num_active if module.is_expert else 1)
        for module in needed_modules(spec, one_expert=True)
        if module.is_linear
    )


def _norm_parameters(spec: ModelSpec) -> int:
    norms = len(spec.form.norms) * spec.hidden_size * (2 if spec.form.norm_bias else 1)
    heads = sum(sum(spec.qk_norm_sizes(layer)) for layer in spec.attention_layers) if spec.form.qk_norm else 0
    return spec.num_layers * norms + heads + spec.hidden_size


def _gate_parameters(spec: ModelSpec) -> int:
    """Numbers of the gates and norms of state layers, which are kept in float32."""
    if spec.state is None or spec.state.recurrent is None:
        return 0
    mamba = spec.state.mamba
    if mamba is not None:
        return spec.state.num_layers * (3 * mamba.num_heads + mamba.inner_size)
    assert spec.state.delta is not None
    return spec.state.num_layers * (2 * spec.state.delta.num_value_heads + spec.state.delta.value_dim)


def weight_bytes(
    spec: ModelSpec, dtype_bytes: int, *, dequantized: bool = False, on_cpu: bool = False
) -> int:
    """Memory of the weights; those that are not quantized take `dtype_bytes` each.

    Args:
        dequantized: counts quantized weights in `dtype_bytes` too, as they are stored if no kernel supports them.
        on_cpu: integers of 4 and 8 bits are kept in blocks, those of experts, too.
    """
    in_float32 = _gate_parameters(spec) + (_norm_parameters(spec) if spec.form.float32_norms else 0)
    index = None if spec.latent is None else spec.latent.index
    if index is not None:  # the weights of index heads
        in_float32 += spec.hidden_size * index.num_heads * sum(map(index.is_in, range(spec.num_layers)))
    wider = (4 - dtype_bytes) * in_float32
    saved = 0 if dequantized else _saved_by_quantization(spec, dtype_bytes, on_cpu=on_cpu)
    return num_parameters(spec) * dtype_bytes + wider - saved


def _saved_by_quantization(spec: ModelSpec, dtype_bytes: int, *, on_cpu: bool) -> int:
    """Bytes saved by linear layers, by experts and tables in blocks, and by an output head that is not tied."""
    if spec.quantization is None:
        return 0
    linears = [("", linear) for linear in _linears_beside_layers(spec)]
    for layer in range(spec.num_layers):
        linears += [(f"{spec.layer_name(layer)}.", linear) for linear in _linears(spec, layer, on_cpu=on_cpu)]
    saved = 0
    for prefix, linear in linears:
        modules = [(prefix + name, rows) for name, rows in linear.rows.items()]
        together = spec.quantization.bytes_together(modules, linear.columns, on_cpu=on_cpu)
        for held, rows in zip(together, linear.rows.values(), strict=True):
            if held is not None:
                saved += linear.num * (rows * linear.columns * dtype_bytes - held)
    table = spec.vocab_size * spec.hidden_size * dtype_bytes
    if not spec.tie_word_embeddings:
        saved += table - _head_bytes(spec, "lm_head", dtype_bytes)
        if spec.quantization.has_tables:
            saved += table - _head_bytes(spec, "model.embed_tokens", dtype_bytes)
    elif _head_bytes(spec, "model.embed_tokens", dtype_bytes) < table:
        saved += table  # rows are looked up in the head
    return saved


def rounded_bytes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """GGUF formats that are rounded to 8 bits, with their memory and their size in the file, in bytes."""
    rounded: dict[str, tuple[int, int]] = {}
    quantization = spec.quantization
    if quantization is None or quantization.method != "gguf":
        return rounded
    sizes = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}
    for module in needed_modules(spec, one_expert=True):
        if module.name == "model.embed_tokens" and not spec.tie_word_embeddings:  # in the serving dtype
            continue
        form = quantization.form_of(module.name, module.shape[-1]) if len(module.shape) == 2 else None
        if form is None or form.is_exact or form.superblock_bytes:
            continue
        name, (rows, columns) = quantization.types[unnumbered(module.name)], module.shape
        num = spec.experts.num_experts if module.is_expert and spec.experts is not None else 1
        held, stored = rounded.get(name, (0, 0))
        rounded[name] = (
            held + num * form.num_bytes(rows, columns),
            stored + num * rows * sizes[name].row_bytes(columns),
        )
    return rounded


def tied_head_bytes(spec: ModelSpec, dtype_bytes: int, *, dequantized: bool = False) -> int:
    """Memory of a head that is tied to the embedding but packed for its kernel, which makes it a copy."""
    if not spec.tie_word_embeddings or spec.encoder is not None:
        return 0
    if spec.quantization is None or dequantized:
        return spec.vocab_size * spec.hidden_size * dtype_bytes
    return _head_bytes(spec, "model.embed_tokens", dtype_bytes)


class EndBytes(NamedTuple):
    """Memory of the embedding and the output head.

    Attributes:
        counted: of both in `weight_bytes`.
        first, last: of pipeline stages with only the embedding, and with only the head.
    """

    counted: int
    first: int
    last: int


def end_bytes(spec: ModelSpec, dtype_bytes: int, *, dequantized: bool = False) -> EndBytes:
    """Memory of the embedding table and of the output head, with the form that each has."""
    table = head = spec.vocab_size * spec.hidden_size * dtype_bytes
    if spec.quantization is not None and not dequantized:
        head = _head_bytes(spec, "model.embed_tokens" if spec.tie_word_embeddings else "lm_head", dtype_bytes)
        if spec.quantization.has_tables and not spec.tie_word_embeddings:
            table = _head_bytes(spec, "model.embed_tokens", dtype_bytes)
    if not spec.tie_word_embeddings:
        return EndBytes(table + head, table, head)
    return EndBytes(0 if head < table else table, min(head, table), head)


def _head_bytes(spec: ModelSpec, name: str, dtype_bytes: int) -> int:
    assert spec.quantization is not None
    held = spec.quantization.bytes_of(name, spec.vocab_size, spec.hidden_size)
    return spec.vocab_size * spec.hidden_size * dtype_bytes if held is None else held


def _linears(spec: ModelSpec, layer: int, *, on_cpu: bool) -> list[_Linear]:
    """A layer's linear layers; without experts if their form is not blocks, because those are dequantized."""
    size, inner = spec.hidden_size, spec.inner_size_of(layer)
    linears: list[_Linear] = []
    if spec.attends(layer):
        linears = _latent_linears(spec, layer) if spec.latent is not None else _attention_linears(spec, layer)
        linears += _as_linears(stream_modules(spec))
    elif spec.has_mixer(layer):
        assert spec.state is not None
        linears = _state_linears(spec.state, size)
    if not spec.has_mlp(layer):
        return linears
    experts = spec.experts
    # The parts of a fused matrix are counted by their own names.
    dense = ("gate_proj", "up_proj", "down_proj") if spec.form.fused_gate_up else spec.form.mlp_names
    if experts is None or layer in experts.dense_layers:
        block = spec.form.names.mlp if experts is None else experts.names.block
        return [*linears, *_mlp_linears(block, size, inner, dense)]
    block, names = experts.names.block, experts.names
    if experts.shared_size:
        linears += _mlp_linears(names.shared_module, size, experts.shared_size, dense)
    if experts.latent_size:
        linears.append(_Linear({f"{block}.{names.latent_down}": experts.latent_size}, size))
        linears.append(_Linear({f"{block}.{names.latent_up}": size}, experts.latent_size))
        size = experts.latent_size
    found = spec.quantization
    if found is not None and found.method not in BLOCK_METHODS and not (on_cpu and found.is_in_blocks):
        return linears
    parts, num = (*experts.first_parts, names.down), experts.num_experts
    return linears + _mlp_linears(f"{block}.experts.0", size, experts.intermediate_size, parts, num)


def _state_linears(state: StateSpec, size: int) -> list[_Linear]:
    if state.mamba is not None:
        return _as_linears(mamba2_modules(size, state, state.mamba))
    if state.delta is None:
        return [
            _Linear({"conv.in_proj": 3 * state.conv_size}, size),
            _Linear({"conv.out_proj": size}, state.conv_size),
        ]
    large: dict[str, int] = {}
    small: dict[str, int] = {}
    for name, rows in delta_projections(state.delta).items():
        (small if name.endswith(("_a", "_b", "_ba")) else large)[name] = rows
    out = _Linear({"linear_attn.out_proj": size}, state.delta.value_size)
    return [_Linear(large, size), _Linear(small, size), out]


def _mlp_linears(name: str, size: int, inner: int, parts: tuple[str, ...], num: int = 1) -> list[_Linear]:
    *first, down = (f"{name}.{part}" for part in parts)
    return [_Linear(dict.fromkeys(first, inner), size, num), _Linear({down: size}, inner, num)]


def _linears_beside_layers(spec: ModelSpec) -> list[_Linear]:
    assert spec.quantization is not None
    linears = _as_linears(modules_beside_layers(spec))
    inputs = spec.streams.layer_inputs
    if inputs is not None and spec.quantization.method in BLOCK_METHODS:  # others leave tables plain
        linears.append(_Linear({LAYER_TABLE: inputs.vocab_size}, spec.num_layers * inputs.size))
    return linears


def _attention_linears(spec: ModelSpec, layer: int) -> list[_Linear]:
    sizes = projection_sizes(spec, layer)
    qkv = dict(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=False))
    if spec.attention.output_gate:
        qkv["q_proj"] *= 2
    num_heads = spec.heads_of(layer).num_heads
    gates = [_Linear({"self_attn.g_proj": num_heads}, spec.hidden_size)] if spec.attention.head_gates else []
    return [
        _Linear({f"self_attn.{name}": rows for name, rows in qkv.items()}, spec.hidden_size),
        *gates,
        _Linear(
            {f"self_attn.{spec.form.names.attention_out}": spec.hidden_size},
            num_heads * spec.value_dim_of(layer),
        ),
    ]


def _latent_linears(spec: ModelSpec, layer: int) -> list[_Linear]:
    return _as_linears(module for module in attention_modules(spec, layer) if module.name != KV_UP)


def _as_linears(modules: Iterable[Module]) -> list[_Linear]:
    """Make a linear layer of each module that is one, each alone."""
    return [
        _Linear({module.name: module.shape[0]}, module.shape[1]) for module in modules if module.is_linear
    ]
