"""`AttentionBackend`: the protocol of attention backends, and `BatchLayout`, their input."""

# Shapes: B requests, T new tokens in the batch, Hq query heads, H KV heads on this rank, D head dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The requests of a batch and their lengths: all that a backend needs to plan a step. Host arrays.

    Attributes:
        rows: [B] pool rows; extends first, then the requests with one new token.
        prefix_lens: [B] tokens before the first new one.
        extend_lens: [B] new tokens, at least 1; they sum to T.
        num_extends: number of leading requests, before those with a single new token.
        num_drafts: [B] drafts among the new tokens; None if no request has any. A request with one more new token than
            drafts decodes. Some backends promise that its result has the bits of that many single-token decodes, one
            after the other, in the same batch.
        sees_to: [T] end of the positions to which a token attends, for tokens of an image that attend to all of it: it
            ends within the step, and is at least that of the token before it in a request; None: each token's own
            position is the last one, as in layers with `LayerView.causal_images`.
    """

    rows: Int64s
    prefix_lens: Int64s
    extend_lens: Int64s
    num_extends: int
    num_drafts: Int64s | None = None
    sees_to: Int64s | None = None

    def decodes(self) -> Int64s:
        """[B] whether a request decodes: its new tokens are the last sampled token and drafts."""
        expected = 1 if self.num_drafts is None else 1 + self.num_drafts
        decodes: Int64s = (self.extend_lens == expected).astype(np.int64)
        return decodes


class StepAttention(Protocol):
    """The attention of one step, planned once and used by every layer."""

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Attend to each request's tokens up to the query's position, or `BatchLayout.sees_to`; in an encoder to all.

        Scores are products times `ModelSpec.score_scale`, capped as `AttentionForm` says. A layer with a window
        (`ModelSpec.window_of`) of W tokens attends to the query's own token and the W - 1 before it; in an encoder to
        the W / 2 before and the W / 2 after it.

        Args:
            q: [T, Hq, D], rotated; query head h reads KV head h // (Hq // H). The keys and values of the new tokens are
                already in the pool.
            sinks: [Hq] float32, the sink of each head (`AttentionForm`), of a model that has them.
            out: [T, Hq * D] in q's dtype, contiguous: memory for the result; None: the result is in new memory.

        Returns:
            [T, Hq * D]; `out`, if it is given.
        """
        ...


def result_of(q: Tensor) -> Tensor:
    """Memory for the result of `StepAttention.forward`: [T, Hq, D] -> [T, Hq * D]."""
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


@runtime_checkable
class PlannedAttention(StepAttention, Protocol):
    """A `StepAttention` that makes the same library calls in each step of T tokens, except for the plan argument."""

    @property
    def plan_addresses(self) -> list[int]:
        """Addresses of the step's plans, one for each distinct `ModelSpec.view_of`, always in the same order."""
        ...


class AttentionBackend(Protocol):
    """One implementation of attention, bound to a model's heads and a KV pool. Backends inherit the defaults."""

    name: ClassVar[str]

    @staticmethod
    def reasons_against(
        spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        """All reasons why this backend cannot run the model here; empty if it can.

        Args:
            spec: the model, with the heads of this rank.
            dtype: dtype of queries and output.
            kv_dtype: dtype of the KV pool.
        """
        ...

    @staticmethod
    def reasons_to_ask(dtype: torch.dtype, kv_dtype: torch.dtype) -> list[str]:
        """Reason why this backend is taken only if it is requested, although it can run; empty: it may be chosen."""
        return []

    @staticmethod
    def reasons_against_pages(spec: ModelSpec, page_size: int) -> list[str]:
        """All reasons why this backend cannot read pages of this many slots; empty if it can."""
        return []

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        """Bind to the pool and to the slot table, [rows, max_model_len] int32 on the device."""
        ...

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        """Plan one step; the slots of the new tokens are already in `req_to_token`."""
        ...

    @property
    def gathered_token_bytes(self) -> int:
        """Temporary bytes that a step takes per attended token of the KV pool; 0 if the pool is read in place."""
        return 0

    def capturable(self) -> CapturableAttention | None:
        """The planner of decodes that can be recorded in a CUDA graph; None: decodes need the host in each step."""
        return None

    def repeatable(self) -> RepeatableAttention | None:
        """The planner of decodes that can be recorded in a native program; None: decodes are not native calls."""
        return None


class CapturableAttention(Protocol):
    """Attention with decode steps that can be recorded in a CUDA graph and replayed with other inputs."""

    def decode_step(self, rows: Tensor, seq_lens: Tensor) -> StepAttention:
        """Plan a step in which every request decodes one token, from inputs that stay on the device.

        May launch kernels; they are recorded with the rest of the step. The kernels and their grids depend only on
        shapes.

        Args:
            rows: [B] int64, device, fixed memory. All slots of a padding row are in the dummy page.
            seq_lens: [B] int32, device, fixed memory: tokens of each request, including the new one; 1 for padding.
        """
        ...


class RepeatableAttention(Protocol):
    """Attention on the CPU with steps of library calls that can be repeated for other requests."""

    def repeatable_step(self, rows: Tensor, prefix_lens: Tensor, extend_lens: Tensor) -> StepAttention:
        """Plan a step of T tokens in which every request decodes, from inputs in fixed memory.

        The planning calls and those of `forward` can be repeated unchanged after other values are written into that
        memory: their arguments are constants and addresses, valid while this object and the arguments live. Only a
        whole step may be repeated, because `forward` uses the plan made last, which can be another step's.

        Args:
            rows, prefix_lens, extend_lens: [T] int64, see `BatchLayout`; the lengths sum to T. A request with several
                tokens has drafts. With fewer requests than tokens, the remaining entries have extend_lens 0.
        """
        ...
