"""Latent attention (MLA, DeepSeek-V2 2024): one small row per token in the KV pool, shared by all heads.

A head's key is W_k c, and its score q · W_k c = (W_k^T q) · c, where c is the latent of the key's token. So queries are
multiplied by W_k^T and attention reads the rows of the pool directly, as one KV head for all query heads (the absorbed
form). Its output, a mean of latents, is multiplied by W_v per head. `LatentSpec` has the sizes.
"""

# Shapes: T new tokens in the batch, W of them kept, H heads of this rank, K size of a latent, R rotated dimensions.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.rotation import LayerKV, RotaryStore
from ..weights.reader import ModuleWeight, Slice
from .indexer import Indexer
from .layer import kept_adapters
from .linear import Linear, RowLinear
from .norm import RMSNorm
from .spans import equal_span

if TYPE_CHECKING:
    from ...models.spec.layer_form import LatentSpec
    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from .layer import SelectRows


class LatentAttention:
    """o(W_v attention(W_k^T q(x), kv(x))), with a norm over the latents of kv(x) and rotary over the last R numbers."""

    def __init__(self, context: ModelContext, name: str, layer_id: int) -> None:
        """Take the weights from a checkpoint."""
        spec, ops, group = context.spec, context.ops, context.group
        latent = spec.latent
        assert latent is not None
        self.layer_id = layer_id
        self.latent = latent
        self.interleaved = spec.form.interleaved_rope
        self.store_latent = ops.store_latent
        self.row_size = spec.heads_of(layer_id).head_dim
        heads = equal_span(spec.num_heads, group)
        self.q = _Queries(context, name, latent)
        size = spec.hidden_size
        self.kv = Linear(
            context, [f"{name}.kv_a_proj_with_mqa"], size, [latent.key_size], bias=spec.biases.qkv
        )
        self.indexer: Indexer | None = None
        if latent.index is not None and latent.index.is_in(layer_id):
            self.indexer = Indexer(context, f"{name}.indexer", latent, latent.index)
        self.kv_norm = RMSNorm(context, f"{name}.kv_a_layernorm", latent.kv_lora_rank, latent.norm_eps)
        self.num_heads = len(heads)
        up_keys, up_values = _kv_up(context, name, latent)
        self.absorb = ops.pack_heads(up_keys.transpose(1, 2))
        self.up_values = ops.pack_heads(up_values)
        self.o = RowLinear(
            context,
            f"{name}.o_proj",
            spec.num_heads * latent.v_head_dim,
            size,
            bias=spec.biases.attention_out,
        )

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        """[T, hidden] -> [W, hidden]: only the kept rows of the attention output are projected."""
        absorbed_THD = self.store(x, cos, sin, batch)
        latent = self.latent
        attended = select_rows(batch.attention.forward(self.layer_id, absorbed_THD))
        rows_WHD = attended.view(attended.shape[0], self.num_heads, self.row_size)
        values_WHD = rows_WHD.new_empty((*rows_WHD.shape[:2], latent.v_head_dim))
        self.up_values(rows_WHD[..., : latent.kv_lora_rank], values_WHD)
        return self.o(values_WHD.flatten(1), kept_adapters(batch, select_rows))

    def store(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """Store the rows of the tokens in the KV pool; returns the absorbed queries, [T, H, K + R]."""
        adapters = None if batch.adapters is None else batch.adapters.tokens
        latent = self.latent
        queries, q_latent = self.q(x, adapters)
        q_THD = queries.view(x.shape[0], self.num_heads, latent.qk_head_dim)
        absorbed_THD = q_THD.new_empty((x.shape[0], self.num_heads, self.row_size))
        self.absorb(q_THD[..., : latent.qk_nope_head_dim], absorbed_THD[..., : latent.kv_lora_rank])
        kv, loc = batch.kv_pool.layer(self.layer_id), batch.out_cache_loc
        stored = kv
        if self.indexer is not None:  # index keys are put after the rows before these are stored
            rows_T1D = q_THD.new_empty((x.shape[0], 1, latent.key_size))
            stored, loc = LayerKV(rows_T1D, rows_T1D), torch.arange(x.shape[0])
        self.store_latent(
            q_THD[..., latent.qk_nope_head_dim :],
            absorbed_THD[..., latent.kv_lora_rank : latent.key_size],
            self.kv(x, adapters),
            (self.kv_norm.weight, self.kv_norm.eps),
            RotaryStore(cos, sin, stored, loc, self.interleaved),
        )
        if self.indexer is not None:
            absorbed_THD[..., latent.key_size :] = 0
            rows = torch.cat((stored.k, self.indexer.keys(x, cos, sin, adapters)), dim=-1)
            kv.k.index_copy_(0, batch.out_cache_loc, rows)
            self.indexer.choose(x, q_latent, cos, sin, batch, self.layer_id)
        return absorbed_THD


class _Queries:
    """The queries of this rank's heads, directly or through a latent of their own."""

    def __init__(self, context: ModelContext, name: str, latent: LatentSpec) -> None:
        spec, group = context.spec, context.group
        heads = equal_span(spec.num_heads, group)
        outputs = None if group.size == 1 else [heads.times(latent.qk_head_dim)]
        q_size, size, rank = spec.num_heads * latent.qk_head_dim, spec.hidden_size, latent.q_lora_rank
        self.down: tuple[Linear, RMSNorm] | None = None
        if rank is None:
            self.up = Linear(context, [f"{name}.q_proj"], size, [q_size], bias=False, outputs=outputs)
            return
        self.down = (
            Linear(context, [f"{name}.q_a_proj"], size, [rank], bias=spec.biases.qkv),
            RMSNorm(context, f"{name}.q_a_layernorm", rank, latent.norm_eps),
        )
        self.up = Linear(context, [f"{name}.q_b_proj"], rank, [q_size], bias=False, outputs=outputs)

    def __call__(self, x: Tensor, adapters: AdapterRuns | None) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> [T, H * (unrotated + R)], and the latents that they are made of, or x."""
        if self.down is not None:
            project, norm = self.down
            x = norm(project(x, adapters))
        return self.up(x, adapters), x


def _kv_up(context: ModelContext, name: str, latent: LatentSpec) -> tuple[Tensor, Tensor]:
    """W_k [H, unrotated, K] and W_v [H, values, K] of this rank's heads, in the serving dtype."""
    spec, group = context.spec, context.group
    width = latent.qk_nope_head_dim + latent.v_head_dim
    heads = equal_span(spec.num_heads, group)
    part = None if group.size == 1 else Slice(0, *heads.times(width))
    shape = (spec.num_heads * width, latent.kv_lora_rank)
    weight = context.linear_format.dense([ModuleWeight(context.weights, f"{name}.kv_b_proj", shape, part)])
    keys, values = weight.view(len(heads), width, -1).split(
        (latent.qk_nope_head_dim, latent.v_head_dim), dim=1
    )
    return keys, values
