"""Norms of queries and keys over heads and ranks, and factors of queries by position."""

# Shapes: T tokens, Hq query heads, H KV heads, D head dim; Hq and H of this rank.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.rotation import HeadNorms
from ..weights.reader import Slice
from .spans import Span, equal_span, kv_head_span

if TYPE_CHECKING:
    from ...models.spec.layer_form import TemperatureTuning
    from ..model_context import ModelContext


def joint_norms(context: ModelContext, name: str, layer_id: int) -> HeadNorms:
    """The weights of this rank's heads, from `<name>.q_norm` and `<name>.k_norm`: [Hq * D] and [H * D]."""
    spec, group = context.spec, context.group
    q_heads, k_heads = Span(0, spec.num_heads), Span(0, spec.num_kv_heads)
    if group.size > 1:
        q_heads, k_heads = equal_span(spec.num_heads, group), kv_head_span(spec.num_kv_heads, group)

    def weight(part: str, size: int, heads: Span) -> Tensor:
        rows = Slice(0, *heads.times(spec.head_dim))
        return context.weights.stacked([f"{name}.{part}.weight"], [(size,)], slices=[rows])

    q_size, k_size = spec.qk_norm_sizes(layer_id)
    return HeadNorms(weight("q_norm", q_size, q_heads), weight("k_norm", k_size, k_heads), spec.rms_norm_eps)


class NormsOverRanks:
    """The norms where a mean is one over the heads of all ranks: the ranks add up their sums of squares."""

    def __init__(self, context: ModelContext, norms: HeadNorms, layer_id: int) -> None:
        """Take this rank's weights."""
        spec, group = context.spec, context.group
        self._norms = norms
        self._all_reduce = group.all_reduce
        self._num_q = spec.num_heads // group.size
        self._num_kv = len(kv_head_span(spec.num_kv_heads, group))
        # With fewer KV heads than ranks several ranks have the same head.
        copies = self._num_kv * group.size / spec.num_kv_heads
        q_size, k_size = spec.qk_norm_sizes(layer_id)
        counts = q_size, k_size * copies
        self._counts = torch.tensor(counts, dtype=torch.float32, device=context.device)
        self._weight = torch.cat((norms.q_weight, norms.k_weight)).to(torch.float32)

    def __call__(self, qkv: Tensor) -> Tensor:
        """[T, Hq + 2H, D] with q and k normalized, in place."""
        num_tokens, _, head_dim = qkv.shape
        sizes = self._num_q * head_dim, self._num_kv * head_dim
        qk = qkv[:, : self._num_q + self._num_kv].to(torch.float32).flatten(1)
        squares = [part.square().sum(dim=-1) for part in qk.split(sizes, dim=-1)]
        means = self._all_reduce(torch.stack(squares, dim=-1)) / self._counts
        factors = (means + self._norms.eps).rsqrt()
        factor_of_each = torch.cat(
            [factors[:, n : n + 1].expand(-1, size) for n, size in enumerate(sizes)], dim=1
        )
        normalized = (qk * factor_of_each * self._weight).view(num_tokens, -1, head_dim)
        qkv[:, : self._num_q + self._num_kv] = normalized.to(qkv.dtype)
        return qkv


def unit_norms(context: ModelContext) -> HeadNorms:
    """Norms with weights of one.

    Llama 4 normalizes after rotary, which does not change a root mean square: the two commute if whole heads rotate and
    cos and sin have no factor.
    """
    ones = torch.ones(context.spec.head_dim, dtype=context.dtype, device=context.device)
    return HeadNorms(ones, ones, context.spec.rms_norm_eps)


class QueryFactors:
    """The factors of all positions."""

    @classmethod
    def of(cls, context: ModelContext) -> QueryFactors | None:
        """Make the factors of the model; None: it has none."""
        tuning = context.spec.attention.temperature
        return None if tuning is None else cls(context, tuning)

    def __init__(self, context: ModelContext, tuning: TemperatureTuning) -> None:
        """Compute the factors."""
        positions = torch.arange(context.max_model_len, dtype=torch.float32)
        steps = ((positions + tuning.offset) / tuning.length).floor()
        factors = 1 + tuning.scale * torch.log1p(steps)
        self._table = factors.unsqueeze(1).to(context.device)
        self._take_rows = context.ops.take_rows
        self._unrotated_only = tuning.unrotated_only

    def for_layer(self, rotates: bool) -> QueryFactors | None:
        """These, or None for a layer of which the queries have none."""
        return None if rotates and self._unrotated_only else self

    def at(self, positions: Tensor) -> Tensor:
        """[T] int64 -> [T, 1] float32."""
        return self._take_rows(self._table, positions)
