"""`Indexer`: the index queries and keys of sparse latent attention (DeepSeek-V3.2, 2025); see `IndexSpec`.

Keys are stored at the ends of the rows of the KV pool. `attention.indexed` chooses the tokens and attends to them.
"""

# Shapes: T new tokens in the batch, Hi index heads, Di size of an index key, R rotated dimensions.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ..attention.indexed import IndexedStep
from ..kernels.plain import rotate
from .linear import Linear
from .norm import LayerNorm

if TYPE_CHECKING:
    from ...models.spec.layer_form import IndexSpec, LatentSpec
    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext

_NORM_EPS: Final = 1e-6


class Indexer:
    """The indexer of one layer; every rank has all of it, so that all choose the same tokens."""

    def __init__(self, context: ModelContext, name: str, latent: LatentSpec, index: IndexSpec) -> None:
        """Take the weights from a checkpoint."""
        assert latent.q_lora_rank is not None
        size, self.index = context.spec.hidden_size, index
        num_outputs = index.num_heads * index.head_dim
        self.q = Linear(context, [f"{name}.wq_b"], latent.q_lora_rank, [num_outputs], bias=False)
        self.k = Linear(context, [f"{name}.wk"], size, [index.head_dim], bias=False)
        self.k_norm = LayerNorm(context, f"{name}.k_norm", index.head_dim, _NORM_EPS, bias=True)
        shape = (index.num_heads, size)
        self.head_weights = context.weights.tensor(f"{name}.weights_proj.weight", shape, torch.float32)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """The rotated index keys: [T, hidden] -> [T, 1, Di]."""
        return self._rotated(self.k_norm(self.k(x, adapters)).unsqueeze(1), cos, sin)

    def choose(
        self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, layer_id: int
    ) -> None:
        """Choose the tokens to which the tokens of the step attend, from this layer on.

        Args:
            x, q_latent: [T, hidden] and [T, latent of queries].
        """
        step = batch.attention
        assert isinstance(step, IndexedStep), step
        if not step.long:
            return
        q = self.q(q_latent, None if batch.adapters is None else batch.adapters.tokens)
        q_THD = self._rotated(q.view(len(x), self.index.num_heads, -1), cos, sin)
        step.choose(layer_id, q_THD, x.to(torch.float32) @ self.head_weights.T)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, Di], of which the first R numbers rotate."""
        cos, sin = cos.unsqueeze(1).to(heads.dtype), sin.unsqueeze(1).to(heads.dtype)
        return rotate(heads, cos, sin, interleaved=self.index.interleaved_rope)
