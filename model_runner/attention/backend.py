"""What an attention backend is given and what it promises."""

# Shapes: B requests, T new tokens in the batch, Hq query heads, H KV heads on this rank, D head dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ModelSpec
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Who is in a batch and how long; all a backend plans from. Host arrays.

    Attributes:
        rows: [B] pool rows; extends first, then the requests with one new token.
        prefix_lens: [B] tokens before the first new one.
        extend_lens: [B] new tokens, at least 1; they sum to T.
        num_extends: requests before the trailing ones that have a single new token.
        num_drafts: [B] drafts among the new tokens; None if nobody has any. Who has one more new token than drafts
            decodes, and gets, where a backend promises it, the bits of as many decodes in the same company.
    """

    rows: Int64s
    prefix_lens: Int64s
    extend_lens: Int64s
    num_extends: int
    num_drafts: Int64s | None = None

    def decodes(self) -> Int64s:
        """[B] whether a request decodes: its new tokens are the last one that was sampled, and drafts."""
        expected = 1 if self.num_drafts is None else 1 + self.num_drafts
        decodes: Int64s = (self.extend_lens == expected).astype(np.int64)
        return decodes


class StepAttention(Protocol):
    """The attention of one step, planned once and used by every layer."""

    def forward(self, layer_id: int, q: Tensor) -> Tensor:
        """Attend to each request's tokens up to the query's position.

        Scores are divided by sqrt(D). A layer with a window (`ModelSpec.window_of`) of W tokens attends to the query's
        own and the W - 1 before it.

        Args:
            q: [T, Hq, D], rotated; query head h reads KV head h // (Hq // H). Keys and values of the new tokens are in
                the pool already.

        Returns:
            [T, Hq * D].
        """
        ...


@runtime_checkable
class PlannedAttention(StepAttention, Protocol):
    """One whose calls of our library are the same in each step of T tokens, but for the plan that they are given."""

    @property
    def plan_addresses(self) -> list[int]:
        """Of the step's plans, one for each distinct window of the model, always in the same order."""
        ...


class AttentionBackend(Protocol):
    """One way to compute attention, bound to a model's heads and a KV pool; backends inherit what has a default."""

    name: ClassVar[str]

    @staticmethod
    def reasons_against(
        spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        """Why it cannot run this model here: all reasons, none if it can.

        Args:
            spec: with the heads of this rank.
            dtype: of queries and of what comes out.
            kv_dtype: of the KV pool.
        """
        ...

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        """Bind to the pool and to the slot table, [rows, max_model_len] int32 on the device."""
        ...

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        """Plan one step; the slots of the new tokens are in `req_to_token` already."""
        ...

    @property
    def gathered_token_bytes(self) -> int:
        """Memory that a step takes of each token in the KV pool that it attends to; 0 where the pool is read itself."""
        return 0

    def capturable(self) -> CapturableAttention | None:
        """What plans decodes that can be recorded in a CUDA graph; None: they need the host in each step."""
        return None

    def repeatable(self) -> RepeatableAttention | None:
        """What plans decodes that can be recorded in a native program; None: they are not native calls."""
        return None


class CapturableAttention(Protocol):
    """Attention whose decode steps can be recorded in a CUDA graph and replayed with other numbers."""

    def decode_step(self, rows: Tensor, seq_lens: Tensor) -> StepAttention:
        """Plan a step in which everybody decodes one token, from numbers that stay on the device.

        May launch kernels; they are recorded with the rest of the step. What it launches, and with what grids, depends
        on shapes only.

        Args:
            rows: [B] int64, device, fixed memory. Padding has a row whose slots are all of the dummy page.
            seq_lens: [B] int32, device, fixed memory: tokens of each request, the new one included; 1 for padding.
        """
        ...


class RepeatableAttention(Protocol):
    """Attention on the CPU whose steps are calls to our library that may be made again for other requests."""

    def repeatable_step(self, rows: Tensor, prefix_lens: Tensor, extend_lens: Tensor) -> StepAttention:
        """Plan a step of T tokens in which everybody decodes, from numbers in memory that stays.

        The calls that plan it, and those of its `forward`, may be repeated as they are once other numbers stand there:
        all their arguments are numbers and addresses that stay, as long as this object and the arguments live.
        Repeated is a whole step: the calls of `forward` rest on the plan made last, be it another step's.

        Args:
            rows, prefix_lens, extend_lens: [T] int64, see `BatchLayout`; the lengths sum to T. Who has several tokens
                has drafts. Where there are fewer requests than tokens, the others have no tokens: extend_lens is 0.
        """
        ...
