"""Self-attention block: projections, head norms and rotary around the batch's attention backend."""

# Shapes: T new tokens in the batch, W of them kept, Hq query heads, H KV heads (both of this rank), D head dim.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.weight_files.needed_tensors import projection_sizes
from ..ops.rotation import HeadNorms, RotaryStore
from ..weights.reader import Slice
from .layer import kept_adapters
from .linear import Linear, RowLinear
from .query_norms import NormsOverRanks, joint_norms, unit_norms
from .spans import Span, equal_span, kv_head_span

if TYPE_CHECKING:
    from ...models.spec.layer_form import LayerHeads
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from .layer import SelectRows
    from .norm import RMSNorm
    from .query_norms import QueryFactors


class SelfAttention:
    """o(attention(rotary(q(x)), rotary(k(x)), v(x))), with q, k and v in one matmul, and sinks if the model has them.

    Heads of v may be smaller than those of q and k. A layer may have no v, as its keys are its values, or only q, as it
    attends to the keys and values of another one. With gates, for each number or for each head, o gets the product of
    what is attended to and sigmoid(gate(x)). The attention backend takes the window, the heads and the source of a
    layer from the `ModelSpec`.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        layer_id: int,
        *,
        fused: bool = False,
        qk_norms: tuple[RMSNorm, RMSNorm | None] | None = None,
        query_factors: QueryFactors | None = None,
        input_size: int | None = None,
    ) -> None:
        """Take the weights from a checkpoint.

        Args:
            fused: the checkpoint holds q, k and v as one `qkv_proj`.
            qk_norms: applied to each head of q and of k, before rotary; both have the same eps. That of k is None in a
                layer without k. Norms over all heads together are taken from the checkpoint here.
            query_factors: of the rotated queries, by position; None: 1.
            input_size: size of x, if it is not the hidden size.
        """
        spec = context.spec
        self.layer_id = layer_id
        heads = spec.heads_of(layer_id)
        self.head_dim = heads.head_dim
        self.has_kv = spec.computes_kv(layer_id)
        self.keys_are_values = self.has_kv and spec.keys_are_values(layer_id)
        self.rotate_and_store = context.ops.rotate_and_store
        self.head_norms: HeadNorms | None = None
        if qk_norms is not None:
            q_norm, k_norm = qk_norms
            k_weight = q_norm.weight if k_norm is None else k_norm.weight
            self.head_norms = HeadNorms(q_norm.weight, k_weight, q_norm.eps, spec.form.value_norm)
        elif spec.form.unit_qk_norm and spec.rotates(layer_id):
            self.head_norms = unit_norms(context)
        self.norms_over_ranks: NormsOverRanks | None = None
        if spec.form.qk_norm_over_heads:
            self.head_norms = joint_norms(context, name, layer_id)
            if context.group.size > 1:
                self.norms_over_ranks = NormsOverRanks(context, self.head_norms, layer_id)
                self.head_norms = None
        self.interleaved = spec.form.interleaved_rope
        self.query_factors = query_factors
        sizes = projection_sizes(spec, layer_id)
        q_size, names = sizes[0], [f"{name}.{part}_proj" for part in "qkv"[: len(sizes)]]
        outputs = _rank_outputs(context, heads, sizes, spec.value_dim_of(layer_id), fused=fused)
        self.gate: Linear | None = None
        self.mul_sigmoid = context.ops.mul_sigmoid
        if spec.attention.output_gate:
            names, sizes, outputs, gates = _gated_parts(context, name)
            gate_names, gate_sizes = [f"{name}.q_proj"] * len(gates), [2 * q_size] * len(gates)
            self.gate = Linear(
                context, gate_names, spec.hidden_size, gate_sizes, bias=spec.biases.qkv, outputs=gates
            )
        own = equal_span(heads.num_heads, context.group), kv_head_span(heads.num_kv_heads, context.group)
        if spec.attention.head_gates:
            mine = None if context.group.size == 1 else [own[0]]
            gate_name, num_gates = f"{name}.g_proj", [heads.num_heads]
            self.gate = Linear(context, [gate_name], spec.hidden_size, num_gates, bias=False, outputs=mine)
        if spec.form.grouped_qkv:
            outputs = _grouped_parts(context)
        if fused:
            num_parts = 1 if outputs is None else len(outputs)
            names, sizes = [f"{name}.qkv_proj"] * num_parts, [sum(sizes)] * num_parts
        self.num_qk = sum(map(len, own)) * self.head_dim
        self.qkv = Linear(
            context, names, input_size or spec.hidden_size, sizes, bias=spec.biases.qkv, outputs=outputs
        )
        self.value_dim, self.value_scale = spec.value_dim_of(layer_id), spec.attention.value_scale
        self.scale = context.ops.scale
        self.sinks: Tensor | None = None
        if spec.has_sinks(layer_id):
            shape, rows = (heads.num_heads,), [Slice(0, *own[0])]
            self.sinks = context.weights.stacked([f"{name}.sinks"], [shape], torch.float32, rows)
        self.o = RowLinear(
            context,
            f"{name}.{spec.form.names.attention_out}",
            heads.num_heads * self.value_dim,
            spec.hidden_size,
            bias=spec.biases.attention_out,
        )

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        """[T, hidden] -> [W, hidden]: only the kept rows of the attention output are projected."""
        q_THD = self.store(x, cos, sin, batch)
        attended = select_rows(batch.attention.forward(self.layer_id, q_THD, self.sinks))
        kept = kept_adapters(batch, select_rows)
        if self.value_dim != self.head_dim:
            heads = attended.view(attended.shape[0], -1, self.head_dim)
            attended = heads[..., : self.value_dim].flatten(1)
        if self.value_scale != 1.0:
            attended = self.scale(attended, self.value_scale)
        if self.gate is not None:
            attended = self.mul_sigmoid(self.gate(select_rows(x), kept), attended)
        return self.o(attended, kept)

    def store(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """Store the keys and values of the tokens in the KV pool; returns the rotated queries, [T, Hq, D]."""
        adapters = batch.adapters
        qkv = self.qkv(x) if adapters is None else self.qkv(x, adapters.tokens)
        if self.value_dim != self.head_dim:
            qkv = self._with_whole_values(qkv)
        qkv_THD = qkv.view(x.shape[0], -1, self.head_dim)
        if self.norms_over_ranks is not None:
            qkv_THD = self.norms_over_ranks(qkv_THD)
        return self.rotate_and_store(
            qkv_THD,
            self.head_norms,
            RotaryStore(
                cos,
                sin,
                batch.kv_pool.layer(self.layer_id) if self.has_kv else None,
                batch.out_cache_loc,
                self.interleaved,
                None if self.query_factors is None else self.query_factors.at(batch.positions),
                self.keys_are_values,
            ),
        )

    def _with_whole_values(self, qkv: Tensor) -> Tensor:
        """[T, q, k and v] with zeros at the ends of the heads of v, so that these are as large as those of k."""
        values = qkv[:, self.num_qk :].unflatten(1, (-1, self.value_dim))
        padded = F.pad(values, (0, self.head_dim - self.value_dim)).flatten(1)
        return torch.cat((qkv[:, : self.num_qk], padded), dim=1)


def _gated_parts(context: ModelContext, name: str) -> tuple[list[str], list[int], list[Span], list[Span]]:
    """The parts of q, k and v where the rows of a head's gate follow those of its query, and the spans of the gates."""
    spec, group = context.spec, context.group
    heads = range(*equal_span(spec.num_heads, group))
    kv = kv_head_span(spec.num_kv_heads, group).times(spec.head_dim)
    kv_size = spec.num_kv_heads * spec.head_dim
    queries = [Span(2 * head, 2 * head + 1).times(spec.head_dim) for head in heads]
    gates = [Span(2 * head + 1, 2 * head + 2).times(spec.head_dim) for head in heads]
    names = [f"{name}.q_proj"] * len(queries) + [f"{name}.k_proj", f"{name}.v_proj"]
    sizes = [2 * spec.num_heads * spec.head_dim] * len(queries) + [kv_size, kv_size]
    return names, sizes, [*queries, kv, kv], gates


def _grouped_parts(context: ModelContext) -> list[Span]:
    """The spans of this rank's q, k and v in a matrix with the rows of each KV head together."""
    spec, group = context.spec, context.group
    each = spec.num_heads // spec.num_kv_heads
    q = [(head // each * (each + 2) + head % each) for head in range(*equal_span(spec.num_heads, group))]
    kv = [head * (each + 2) + each for head in range(*kv_head_span(spec.num_kv_heads, group))]
    return [Span(n, n + 1).times(spec.head_dim) for n in (*q, *kv, *(n + 1 for n in kv))]


def _rank_outputs(
    context: ModelContext, heads: LayerHeads, sizes: list[int], value_dim: int, *, fused: bool
) -> list[Span] | None:
    """This rank's rows of q, k and v; None if it has all of them.

    Args:
        sizes: number of rows of each of them that the layer has.
        fused: one matrix holds all of them.
    """
    group = context.group
    if group.size == 1:
        return None
    q_heads, kv_heads = equal_span(heads.num_heads, group), kv_head_span(heads.num_kv_heads, group)
    starts = [sum(sizes[:n]) if fused else 0 for n in range(len(sizes))]
    parts = [q_heads, *[kv_heads] * (len(sizes) - 1)]
    dims = [heads.head_dim, heads.head_dim, value_dim][: len(sizes)]
    return [part.times(dim, start) for part, dim, start in zip(parts, dims, starts, strict=True)]
