"""`RecordedStep`: a decode step that is replayed; made by `StepRecordings`, part of the `ForwardBatch` it is for."""

# Shapes: B requests; n of a recorded step, padding included; T new tokens in the batch; V tokens of the vocabulary.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

    from ..attention.backend import BatchLayout, Int64s
    from ..row_states import Int32s

Replay = Callable[[], None]
Advance = Callable[["Int32s"], None]


class RecordedStep(NamedTuple):
    """A decode step of a fixed number of tokens, which is also that of its requests, unless it checks drafts.

    Attributes:
        rows, positions, out_cache_loc, input_ids: [n] int64 each, the numbers of its batch: where it reads them.
        replay: queues the step.
        logits: [n, V] float32, where it leaves them until the next replay of any step.
        advance: brings the numbers of a burst's next round there, given its slots [n] int32; the tokens of the round
            before are in the relay. None: they have to be made ready like those of any step.
    """

    rows: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    input_ids: Tensor
    replay: Replay
    logits: Tensor
    advance: Advance | None = None

    def without_padding(self, num: int) -> Self:
        """The same step as seen by its `num` real requests."""
        if num == len(self.rows):
            return self
        return self._replace(
            rows=self.rows[:num],
            positions=self.positions[:num],
            out_cache_loc=self.out_cache_loc[:num],
            input_ids=self.input_ids[:num],
            logits=self.logits[:num],
        )


class StepRecordings(Protocol):
    """What is recorded, or the knowledge that nothing is."""

    def ready(
        self, rows: Int64s, positions: Int64s, out_cache_loc: Int64s, known_ids: Int64s
    ) -> RecordedStep | None:
        """Bring the numbers of a decode step, [B] each (see `DecodeInputs`), to where a recording reads them.

        The slot table is up to date but for `out_cache_loc`, which is a matter of the recording.

        Returns:
            the recording without its padding; None if there is none for such a step.
        """
        ...

    def ready_tokens(
        self, layout: BatchLayout, positions: Tensor, out_cache_loc: Tensor, input_ids: Tensor
    ) -> RecordedStep | None:
        """The same for a step in which the logits of all tokens are wanted: one that checks drafts.

        Args:
            positions, out_cache_loc, input_ids: [T] int64, device; they stand in the slot table already.
        """
        ...


class NoRecordings:
    """Every step is launched kernel by kernel."""

    def ready(
        self, rows: Int64s, positions: Int64s, out_cache_loc: Int64s, known_ids: Int64s
    ) -> RecordedStep | None:
        """Nothing is recorded."""
        return None

    def ready_tokens(
        self, layout: BatchLayout, positions: Tensor, out_cache_loc: Tensor, input_ids: Tensor
    ) -> RecordedStep | None:
        """Nothing is recorded."""
        return None
