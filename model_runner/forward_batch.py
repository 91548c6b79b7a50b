"""`ForwardBatch`: what a model reads of one step, on the device; complete when constructed.

An argument of everything that runs in the step, never a global. A `StepExecutor` makes it from an `InputBatch`; models
and layers read it.
"""

# Shapes: T new tokens in the batch, W of them with logits.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .attention.backend import StepAttention
    from .memory.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64.
        kv_pool, out_cache_loc: where the keys and values of the new tokens go: [T] int64 slots.
        attention: what each token may see.
        logits_indices: [W] int64, ascending, the tokens whose hidden states are read: after the last layer's
            attention nothing is computed of the others. None: all T.
    """

    input_ids: Tensor
    positions: Tensor
    kv_pool: KVPool
    out_cache_loc: Tensor
    attention: StepAttention
    logits_indices: Tensor | None = None
