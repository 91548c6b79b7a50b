"""Self-attention block: projections, norms of the heads and rotary around the batch's attention backend."""

# Shapes: T new tokens in the batch, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from .linear import Linear

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ModelSpec
    from ..forward_batch import ForwardBatch
    from ..weights.reader import WeightReader
    from .norm import RMSNorm


class SelfAttention:
    """o(attention(rotary(q(x)), rotary(k(x)), v(x))), with q, k and v in one matrix product.

    Which tokens a layer sees (its window) is known to the attention backend, from the `ModelSpec`.
    """

    def __init__(
        self,
        weights: WeightReader,
        name: str,
        spec: ModelSpec,
        layer_id: int,
        *,
        fused: bool = False,
        qk_norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        """Take the weights from a checkpoint.

        Args:
            fused: the checkpoint holds q, k and v as one `qkv_proj`.
            qk_norms: applied to each head of q and of k, before rotary.
        """
        self.layer_id = layer_id
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qk_norms = qk_norms
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        names, sizes = [f"{name}.{part}_proj" for part in "qkv"], [q_size, kv_size, kv_size]
        if fused:
            names, sizes = [f"{name}.qkv_proj"], [sum(sizes)]
        self.qkv = Linear(weights, names, spec.hidden_size, sizes, bias=spec.attention_bias)
        self.o = Linear(weights, [f"{name}.o_proj"], q_size, [spec.hidden_size], bias=spec.attention_out_bias)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        rotated = self.num_heads + self.num_kv_heads
        qkv_THD = self.qkv(x).view(x.shape[0], rotated + self.num_kv_heads, self.head_dim)
        qk_THD = qkv_THD[:, :rotated]
        if self.qk_norms is not None:
            q_norm, k_norm = self.qk_norms
            qk_THD = torch.cat(
                (q_norm(qk_THD[:, : self.num_heads]), k_norm(qk_THD[:, self.num_heads :])), dim=1
            )
        qk_THD = ops.rotary(qk_THD, cos, sin)  # q and k in one go
        q, k = qk_THD[:, : self.num_heads], qk_THD[:, self.num_heads :]
        return self.o(batch.attention.forward(self.layer_id, q, k, qkv_THD[:, rotated:]))
