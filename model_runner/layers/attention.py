"""Self-attention block: projections and rotary around the batch's attention backend."""

# Shapes: T new tokens in the batch, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops
from .linear import Linear

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ModelSpec
    from ..forward_batch import ForwardBatch
    from ..weights.reader import WeightReader


class SelfAttention:
    """o(attention(rotary(q(x)), rotary(k(x)), v(x))), with q, k and v in one matrix product."""

    def __init__(self, weights: WeightReader, name: str, spec: ModelSpec, layer_id: int) -> None:
        self.layer_id = layer_id
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"]
        self.qkv = Linear(
            weights, projections, spec.hidden_size, [q_size, kv_size, kv_size], bias=spec.attention_bias
        )
        self.o = Linear(weights, [f"{name}.o_proj"], q_size, [spec.hidden_size], bias=spec.attention_bias)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        rotated = self.num_heads + self.num_kv_heads
        qkv_THD = self.qkv(x).view(x.shape[0], rotated + self.num_kv_heads, self.head_dim)
        qk_THD = ops.rotary(qkv_THD[:, :rotated], cos, sin)  # q and k in one go
        q, k = qk_THD[:, : self.num_heads], qk_THD[:, self.num_heads :]
        return self.o(batch.attention.forward(self.layer_id, q, k, qkv_THD[:, rotated:]))
