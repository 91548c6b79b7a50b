"""What an attention backend is given and what it promises."""

# Shapes: B requests, T new tokens in the batch, Hq query heads, H KV heads on this rank, D head dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ModelSpec
    from ..input_buffers import InputBuffers
    from ..kv_pool import KVPool

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Who is in a batch and how long; all a backend plans from. Host arrays.

    Attributes:
        rows: [B] pool rows; extends first, then the requests with one new token.
        prefix_lens: [B] tokens before the first new one.
        extend_lens: [B] new tokens, at least 1; they sum to T.
        num_extends: requests before the trailing ones that have a single new token.
    """

    rows: Int64s
    prefix_lens: Int64s
    extend_lens: Int64s
    num_extends: int


class StepAttention(Protocol):
    """The attention of one step, planned once and used by every layer."""

    def forward(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' keys and values, then attend to each request's tokens up to the query's position.

        Scores are divided by sqrt(D). A layer with a window (`ModelSpec.window_of`) of W tokens attends to the query's
        own and the W - 1 before it.

        Args:
            q: [T, Hq, D]; query head h reads KV head h // (Hq // H).
            k, v: [T, H, D]; rotary is already applied to q and k.

        Returns:
            [T, Hq * D].
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute attention, bound to a model's heads and a KV pool."""

    name: ClassVar[str]

    @staticmethod
    def reasons_against(spec: ModelSpec, device: torch.device) -> list[str]:
        """Why it cannot run this model on this device: all reasons, none if it can."""
        ...

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        """Bind to the pool and to the slot table, [rows, max_model_len] int32 on the device."""
        ...

    def plan_step(self, layout: BatchLayout, out_cache_loc: Tensor) -> StepAttention:
        """Plan one step.

        Args:
            out_cache_loc: [T] int64, device: the slots of the new tokens, already in `req_to_token`.
        """
        ...
