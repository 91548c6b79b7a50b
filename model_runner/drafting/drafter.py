"""`Drafter`: proposes the next tokens of requests from states that only the runner has; see `StepPlan.draft_ids`.

The runner calls a drafter in this order in each step:

    leave     requests leave their rows; their tokens are still in their pages
    start     requests got rows; their cached prefixes are in the KV pool and in the slot table
    draft     the drafts that the plan asks for, from the state left by the last step
    absorb    the step's tokens, after the sampler: with their features, and which of them are valid

Every token that the model computes is absorbed, also those of prompts, because pages with a drafter's keys and values
are shared like the model's: a page must not depend on who has computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from ...models.spec.model_spec import ModelSpec
    from ...runtime.step_plan import NewReq
    from ..attention.backend import AttentionBackend
    from ..batch_builder import BatchBuilder
    from ..input_batch import DraftRows, InputBatch, Int64s
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from ..memory.slot_table import SlotTable
    from ..recording.executor import StepFeatures
    from ..request_states import RequestStates, TokenRelay
    from ..sampling.shared_sampler import SamplerLike
    from .draft_memory import DraftMemory


class Drafter(Protocol):
    """See the module."""

    def start(self, new_reqs: Sequence[NewReq]) -> None:
        """Requests got rows."""
        ...

    def leave(self, rows: Int64s) -> None:
        """Requests leave their rows ([n]): the pages are freed or shared after this call."""
        ...

    def draft(self, asked: DraftRows) -> npt.NDArray[np.int32]:
        """The drafts, [sum of counts], request after request; may wait for the device."""
        ...

    def absorb(self, batch: InputBatch, features: StepFeatures, num_tokens: Tensor | None) -> None:
        """Take the computed tokens of a step.

        Args:
            batch: the step.
            features: of its T tokens.
            num_tokens: [S] int64, device: in a step with drafts, the valid tokens of each request among its new ones,
                see `DraftBatch`. None: all are.
        """
        ...


class DrafterParts(NamedTuple):
    """The parts of a runner that a drafter may use.

    Attributes:
        memory: of the model's own layer that predicts further tokens; None: the drafter has other memory.
        make_attention: makes the attention over such memory: this rank's spec of the layer, the memory's pool, and its
            slot table.
    """

    kv_pool: KVPool
    slot_table: SlotTable
    states: RequestStates
    relay: TokenRelay
    builder: BatchBuilder
    sampler: SamplerLike
    buffers: InputBuffers
    memory: DraftMemory | None
    make_attention: Callable[[ModelSpec, KVPool, Tensor], AttentionBackend]


MakeDrafter = Callable[[DrafterParts], Drafter]
