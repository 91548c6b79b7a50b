"""`needed_modules`: the modules of the engine's own models by name, with the shapes of their weights.

The names are those of Hugging Face's checkpoints; models in `model_runner/structures` take exactly these. A start
compares them with the headers of the files, before any process exists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from ..spec.layer_form import KV_UP
from ..spec.streams_spec import LAYER_TABLE

if TYPE_CHECKING:
    from ..spec.layer_form import IndexSpec, LatentSpec
    from ..spec.model_spec import ModelSpec
    from ..spec.state_spec import DeltaSpec, Mamba2Spec, StateSpec


_MTP: Final = "model.mtp_"
"""ERNIE's name of such layers."""
_KEYS_AND_VALUES: Final = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")


class Module(NamedTuple):
    """One module.

    Attributes:
        name: `<name>.weight` is its weight, or `<name>.<part>`.
        shape: of the weight.
        is_linear: its weight may be quantized.
        has_bias: there is `<name>.bias`, one number for each output.
        part: the last component of the weight's name.
    """

    name: str
    shape: tuple[int, ...]
    is_linear: bool = False
    has_bias: bool = False
    part: str = "weight"

    @property
    def is_expert(self) -> bool:
        """Whether each expert of the layer has such a module."""
        return ".experts." in self.name

    @property
    def num_parameters(self) -> int:
        """Numbers of the weight and of the bias."""
        return math.prod(self.shape) + (self.shape[0] if self.has_bias else 0)


def needed_modules(spec: ModelSpec, *, one_expert: bool = False) -> Iterator[Module]:
    """All modules; the output head only if it is not tied to the embedding.

    Args:
        one_expert: of the experts of a layer, which have the same shapes, only the first.
    """
    table = (spec.vocab_size, spec.hidden_size)
    yield Module("model.embed_tokens", table)
    yield Module(f"model.{spec.form.names.final_norm}", (spec.hidden_size,), has_bias=spec.form.norm_bias)
    if not spec.tie_word_embeddings:
        yield Module("lm_head", table, has_bias=spec.form.head_bias)
    elif spec.form.head_bias:
        yield Module("lm_head", table[:1], part="bias")
    yield from modules_beside_layers(spec)
    yield from _layers(spec, one_expert=one_expert)
    yield from mtp_modules(spec, one_expert=one_expert)
    yield from pooling_modules(spec)


def mtp_modules(spec: ModelSpec, *, one_expert: bool = False) -> Iterator[Module]:
    """The modules of the layer that predicts further tokens; none if it is not used."""
    layer = spec.mtp_layer
    if layer is None or spec.mtp is None:
        return
    for name in spec.mtp.norms:
        yield Module(name, (spec.hidden_size,), has_bias=spec.form.norm_bias)
    yield Module(spec.mtp.projection, (spec.hidden_size, 2 * spec.hidden_size), is_linear=True)
    yield from _layers(layer, one_expert=one_expert)


def _layers(spec: ModelSpec, *, one_expert: bool) -> Iterator[Module]:
    for layer in range(spec.num_layers):
        prefix = f"{spec.layer_name(layer)}."
        blocks: list[Iterable[Module]] = []
        if spec.attends(layer):
            blocks += _head_norms(spec, layer), attention_modules(spec, layer)
        elif spec.has_mixer(layer):
            blocks.append(_state_layer(spec))
        if spec.has_mlp(layer):
            blocks.append(_mlp(spec, layer, one_expert))
        for module in (*_norms(spec, layer), *chain(*blocks), *stream_modules(spec)):
            yield module._replace(name=(prefix + module.name).removesuffix("."))


def is_unused(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor has a name of the family, but no use.

    It belongs to a layer that predicts further tokens (`FilesSpec.num_mtp_layers`), or would make keys and values of a
    layer that attends to those of another one: some files have such.
    """
    further = [f"model.layers.{spec.num_layers + n}." for n in range(spec.files.num_mtp_layers)]
    further += [_MTP] if spec.files.num_mtp_layers > 0 else []
    further += [spec.form.names.mtp] if spec.form.names.mtp else []
    if name.startswith(tuple(further)):
        return spec.mtp_layer is None or spec.mtp is None or not spec.mtp.takes(name)
    found = _KEYS_AND_VALUES.match(name) if spec.streams.kv_sources else None
    return found is not None and int(found[1]) < spec.num_layers and not spec.computes_kv(int(found[1]))


def pooling_modules(spec: ModelSpec) -> Iterator[Module]:
    """The layers after pooling with weights in the model's own files: a classifier."""
    for dense in () if spec.pooling is None else spec.pooling.dense:
        if dense.folder:
            continue
        shape = (dense.out_features, dense.in_features)
        yield Module(dense.weight.removesuffix(".weight"), shape, has_bias=bool(dense.bias))
        if dense.norm:
            yield Module(dense.norm.removesuffix(".weight"), (dense.out_features,))


def _norms(spec: ModelSpec, layer: int) -> Iterator[Module]:
    without = {0: spec.form.without_attention, 1: spec.form.without_mlp}
    for number, name in enumerate(spec.form.norms):
        if layer not in without.get(number, ()):
            yield Module(name, (spec.hidden_size,), has_bias=spec.form.norm_bias)


def modules_beside_layers(spec: ModelSpec) -> Iterator[Module]:
    """The modules of the inputs of layers, and of further residual streams, by their full names."""
    size, inputs = spec.hidden_size, spec.streams.layer_inputs
    if inputs is not None:
        width = spec.num_layers * inputs.size
        yield Module(LAYER_TABLE, (inputs.vocab_size, width))
        yield Module("model.per_layer_model_projection", (width, size), is_linear=True)
        yield Module("model.per_layer_projection_norm", (inputs.size,))
    for name in ("altup_projections", "altup_unembed_projections"):
        for n in range(spec.streams.num_further):
            yield Module(f"model.{name}.{n}", (size, size), is_linear=True)


def stream_modules(spec: ModelSpec) -> Iterator[Module]:
    """Modules of a layer for its inputs and for further residual streams, by the names in the layer."""
    size, inputs, altup = spec.hidden_size, spec.streams.layer_inputs, spec.streams.altup
    if spec.form.layer_scalars:
        yield Module("", (1,), part="layer_scalar")
    if inputs is not None:
        yield Module("per_layer_input_gate", (inputs.size, size), is_linear=True)
        yield Module("per_layer_projection", (size, inputs.size), is_linear=True)
        yield Module("post_per_layer_input_norm", (size,))
    if altup is not None:
        streams, rank = altup.num_streams, altup.laurel_rank
        yield Module("altup", (size,), part="correct_output_scale")
        yield Module("altup.correction_coefs", (streams, streams))
        yield Module("altup.prediction_coefs", (streams * streams, streams))
        yield Module("altup.modality_router", (streams, size))
        yield Module("altup.router_norm", (size,))
        yield Module("laurel.linear_left", (rank, size), is_linear=True)
        yield Module("laurel.linear_right", (size, rank), is_linear=True)
        yield Module("laurel.post_laurel_norm", (size,))


def _head_norms(spec: ModelSpec, layer: int) -> Iterator[Module]:
    names = spec.form.names.q_norm, spec.form.names.k_norm
    for name, size in zip(names, spec.qk_norm_sizes(layer), strict=True) if spec.form.qk_norm else ():
        if size:
            yield Module(f"self_attn.{name}", (size,))


def _state_layer(spec: ModelSpec) -> Iterator[Module]:
    state = spec.state
    assert state is not None
    if state.mamba is not None:
        yield from mamba2_modules(spec.hidden_size, state, state.mamba)
    elif state.delta is not None:
        yield from _delta_net(spec, state, state.delta)
    else:
        yield from _short_conv(spec, state)


def delta_projections(delta: DeltaSpec) -> dict[str, int]:
    """The projections before a delta net, by their names in the layer, with the number of their outputs."""
    large = {"in_proj_qkv": delta.conv_size, "in_proj_z": delta.value_size}
    if delta.fused_large:
        large = {"in_proj_qkvz": delta.conv_size + delta.value_size}
    small = {"in_proj_b": delta.num_value_heads, "in_proj_a": delta.num_value_heads}
    if delta.fused_small:
        small = {"in_proj_ba": 2 * delta.num_value_heads}
    return {f"linear_attn.{name}": rows for name, rows in (large | small).items()}


def _delta_net(spec: ModelSpec, state: StateSpec, delta: DeltaSpec) -> Iterator[Module]:
    for name, rows in delta_projections(delta).items():
        yield Module(name, (rows, spec.hidden_size), is_linear=True)
    yield Module("linear_attn.conv1d", (state.conv_size, 1, state.conv_taps))
    for part in ("A_log", "dt_bias"):
        yield Module("linear_attn", (delta.num_value_heads,), part=part)
    yield Module("linear_attn.norm", (delta.value_dim,))
    yield Module("linear_attn.out_proj", (spec.hidden_size, delta.value_size), is_linear=True)


def mamba2_modules(size: int, state: StateSpec, mamba: Mamba2Spec) -> Iterator[Module]:
    """The modules of a layer of Mamba 2 with inputs of `size`, by their names in the layer."""
    bias = mamba.projection_bias
    yield Module("mamba.in_proj", (mamba.projected_size, size), is_linear=True, has_bias=bias)
    yield Module("mamba.conv1d", (state.conv_size, 1, state.conv_taps), has_bias=state.conv_bias)
    for part in ("A_log", "D", "dt_bias"):
        yield Module("mamba", (mamba.num_heads,), part=part)
    yield Module("mamba.norm", (mamba.inner_size,))
    yield Module("mamba.out_proj", (size, mamba.inner_size), is_linear=True, has_bias=bias)


def _short_conv(spec: ModelSpec, state: StateSpec) -> Iterator[Module]:
    size = spec.hidden_size
    bias, inner = state.conv_bias, state.conv_size
    yield Module("conv.in_proj", (3 * inner, size), is_linear=True, has_bias=bias)
    yield Module("conv.conv", (inner, 1, state.conv_taps), has_bias=bias)
    yield Module("conv.out_proj", (size, inner), is_linear=True, has_bias=bias)


def attention_modules(spec: ModelSpec, layer: int) -> Iterator[Module]:
    """The modules of a layer's attention, by their names in the layer; without the norms of heads."""
    if spec.latent is not None:
        yield from _latent_attention(spec, spec.latent, layer)
        return
    size, sizes = spec.hidden_size, projection_sizes(spec, layer)
    num_heads = spec.heads_of(layer).num_heads
    attended = num_heads * spec.value_dim_of(layer)
    if spec.attention.output_gate:
        sizes[0] *= 2
    if spec.form.fused_qkv:
        sizes = [sum(sizes)]
    for name, rows in zip(spec.form.qkv_names, sizes, strict=False):
        yield Module(f"self_attn.{name}", (rows, size), is_linear=True, has_bias=spec.biases.qkv)
    name = f"self_attn.{spec.form.names.attention_out}"
    yield Module(name, (size, attended), is_linear=True, has_bias=spec.biases.attention_out)
    if spec.attention.head_gates:
        yield Module("self_attn.g_proj", (num_heads, size), is_linear=True)
    if spec.has_sinks(layer):
        yield Module("self_attn", (num_heads,), part="sinks")


def projection_sizes(spec: ModelSpec, layer: int) -> list[int]:
    """Rows of the matrices q, k and v of a layer: no v, or only q, where keys and values come from elsewhere."""
    heads = spec.heads_of(layer)
    kv_sizes = [heads.num_kv_heads * size for size in (heads.head_dim, spec.value_dim_of(layer))]
    parts = 2 - spec.keys_are_values(layer) if spec.computes_kv(layer) else 0
    return [heads.num_heads * heads.head_dim, *kv_sizes[:parts]]


def _latent_attention(spec: ModelSpec, latent: LatentSpec, layer: int) -> Iterator[Module]:
    size, rank = spec.hidden_size, latent.kv_lora_rank
    q_size = spec.num_heads * latent.qk_head_dim
    if latent.q_lora_rank is None:
        yield Module("self_attn.q_proj", (q_size, size), is_linear=True)
    else:
        q_rank = latent.q_lora_rank
        yield Module("self_attn.q_a_proj", (q_rank, size), is_linear=True, has_bias=spec.biases.qkv)
        yield Module("self_attn.q_a_layernorm", (q_rank,))
        yield Module("self_attn.q_b_proj", (q_size, q_rank), is_linear=True)
        if latent.index is not None and latent.index.is_in(layer):
            yield from _indexer(size, q_rank, latent.index)
    yield Module(
        "self_attn.kv_a_proj_with_mqa", (latent.key_size, size), is_linear=True, has_bias=spec.biases.qkv
    )
    yield Module("self_attn.kv_a_layernorm", (rank,))
    yield Module(
        KV_UP, (spec.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank), is_linear=True
    )
    yield Module(
        "self_attn.o_proj",
        (size, spec.num_heads * latent.v_head_dim),
        is_linear=True,
        has_bias=spec.biases.attention_out,
    )


def _indexer(size: int, q_rank: int, index: IndexSpec) -> Iterator[Module]:
    name = "self_attn.indexer"
    yield Module(f"{name}.wq_b", (index.num_heads * index.head_dim, q_rank), is_linear=True)
    yield Module(f"{name}.wk", (index.head_dim, size), is_linear=True)
    yield Module(f"{name}.k_norm", (index.head_dim,), has_bias=True)
    yield Module(f"{name}.weights_proj", (index.num_heads, size))


def _mlp(spec: ModelSpec, layer: int, one_expert: bool) -> Iterator[Module]:
    size, experts = spec.hidden_size, spec.experts
    block = spec.form.names.mlp if experts is None else experts.names.block
    if experts is None or layer in experts.dense_layers:
        yield from _dense(block, size, spec.inner_size_of(layer), spec)
        return
    names = experts.names
    yield Module(f"{block}.{names.router}", (experts.num_experts, size), has_bias=experts.has_bias)
    if experts.has_scales:
        yield Module(f"{block}.router", (size,), part="scale")
        yield Module(f"{block}.router", (experts.num_experts,), part="per_expert_scale")
    if experts.routing.has_bias:
        name, _, part = names.bias.rpartition(".")
        shape = (1, experts.num_experts) if names.bias_is_row else (experts.num_experts,)
        yield Module(f"{block}.{name}" if name else block, shape, part=part)
    if experts.shared_size:
        yield from _dense(names.shared_module, size, experts.shared_size, spec)
    if experts.has_shared_gate:
        yield Module(f"{block}.{names.shared_gate}", (1, size))
    if experts.latent_size:
        yield Module(f"{block}.{names.latent_down}", (experts.latent_size, size), is_linear=True)
        yield Module(f"{block}.{names.latent_up}", (size, experts.latent_size), is_linear=True)
        size = experts.latent_size
    for expert in range(1 if one_expert else experts.num_experts):
        inner, name = experts.intermediate_size, f"{block}.experts.{expert}"
        for part in experts.first_parts:
            yield Module(f"{name}.{part}", (inner, size), is_linear=True, has_bias=experts.has_bias)
        yield Module(f"{name}.{names.down}", (size, inner), is_linear=True, has_bias=experts.has_bias)


def _dense(name: str, size: int, inner: int, spec: ModelSpec) -> Iterator[Module]:
    *first, down = spec.form.mlp_names
    rows = 2 * inner if spec.form.fused_gate_up else inner
    for part in first:
        yield Module(f"{name}.{part}", (rows, size), is_linear=True, has_bias=spec.biases.mlp)
    yield Module(f"{name}.{down}", (size, inner), is_linear=True, has_bias=spec.biases.mlp)
