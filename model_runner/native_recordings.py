"""`NativeRecordings`: decode steps on the CPU as one call to our library each; the sister of `DecodeGraphs`.

A number of tokens is recorded when it is first met, without padding, because that costs one step hardly more than
computing it: the recording is that step. So there is nothing to do at start, and nothing for sizes that never come.
Whose tokens they are, one of each request or some of one that check drafts, is a matter of the attention's plan, which
is made anew by each replay.

The host and the device are one, so input tokens and slot table are brought up to date before the replay. The recording
reaches from there to the logits.
"""

# Shapes: T tokens of a step.

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..runtime.step_plan import ForwardMode
from .arena import Arena
from .attention.backend import BatchLayout
from .forward_batch import ForwardBatch
from .kernels.cpu.library import load_library
from .native_program import NativeProgram, record
from .recorded_step import NoRecordings, RecordedStep
from .sampling_batch import SamplingBatch

if TYPE_CHECKING:
    import ctypes

    from ..runtime.device_config import KernelConfig
    from .attention.backend import AttentionBackend, RepeatableAttention, StepAttention
    from .decode_inputs import Int64s
    from .kv_pool import KVPool
    from .models.registry import CausalLM
    from .recorded_step import StepRecordings
    from .token_relay import TokenRelay

logger = logging.getLogger(__name__)


class NativeRecordings:
    """Recordings of all numbers of tokens met so far.

    Attributes:
        arena: what all recordings work in.
        reason_against: what cannot be recorded of this model, once that is known.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_pool: KVPool,
        attention: RepeatableAttention,
        relay: TokenRelay,
        req_to_token: Tensor,
        max_tokens: int,
        library: ctypes.CDLL,
    ) -> None:
        """`req_to_token`: the slot table; `max_tokens`: larger steps are not recorded."""
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._last_ids = relay.on_host()
        self._slot_table = req_to_token.numpy()
        self._max_tokens = max_tokens
        self._library = library
        self._recordings: dict[int, _Recording] = {}
        self.arena = Arena()
        self.reason_against = ""

    def ready(
        self, rows: Int64s, positions: Int64s, out_cache_loc: Int64s, known_ids: Int64s
    ) -> RecordedStep | None:
        """See `StepRecordings`. The first step of its size is computed here; its replay has nothing left to do."""
        if not self._may_record(len(rows)):
            return None
        self._slot_table[rows, positions] = out_cache_loc
        input_ids = np.where(known_ids < 0, self._last_ids[rows], known_ids)
        layout = BatchLayout(rows, positions, np.ones_like(rows), 0)
        return self._step(layout, positions, out_cache_loc, input_ids)

    def ready_tokens(
        self, layout: BatchLayout, positions: Tensor, out_cache_loc: Tensor, input_ids: Tensor
    ) -> RecordedStep | None:
        """See `StepRecordings`, and `ready`."""
        if not self._may_record(len(positions)):
            return None
        return self._step(layout, positions.numpy(), out_cache_loc.numpy(), input_ids.numpy())

    def _may_record(self, num_tokens: int) -> bool:
        return num_tokens <= self._max_tokens and not self.reason_against

    def _step(
        self, layout: BatchLayout, positions: Int64s, out_cache_loc: Int64s, input_ids: Int64s
    ) -> RecordedStep:
        """The recording for these numbers; the first of its size is computed."""
        size = len(positions)
        recording = self._recordings.get(size) or _Recording(size, self._slot_table, self._last_ids)
        recording.take(layout, positions, out_cache_loc, input_ids)
        if size not in self._recordings:
            self._record(recording)
        return recording.step

    def _record(self, recording: _Recording) -> None:
        """Compute the step, and keep what can be kept of that."""
        started_s, size = time.perf_counter(), recording.size
        recorded = record(self._library, self.arena, lambda: self._compute(recording))
        recording.finish(recorded.program, recorded.result)
        if recorded.program is None:
            self.reason_against = recorded.reason_against
            logger.info("decode_recordings=none: not recordable: %s", recorded.reason_against)
            return
        if not self._recordings:
            logger.info(
                "decode_recordings=native calls=%d tokens=%d arena_mib=%.1f record_ms=%.0f "
                "(said once; other sizes follow when they come)",
                recorded.program.num_calls,
                size,
                self.arena.num_bytes / (1 << 20),
                (time.perf_counter() - started_s) * 1e3,
            )
        self._recordings[size] = recording

    def _compute(self, recording: _Recording) -> Tensor:
        """[T, V] logits; what is recorded."""
        # Its plan lies in memory that belongs to this object.
        recording.attention = self._attention.repeatable_step(
            recording.rows, recording.prefix_lens, recording.extend_lens
        )
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=recording.input_ids,
            positions=recording.positions,
            kv_pool=self._kv_pool,
            out_cache_loc=recording.out_cache_loc,
            attention=recording.attention,
            sample_indices=None,
            sample_rows=recording.rows,
            sampled_idx_np=np.arange(recording.size),
            cut_indices=None,
            cut_idx_np=np.empty(0, dtype=np.int64),
            sampling=SamplingBatch(recording.size),
            prompt_spans=(),
        )
        return self._model.logits(self._model.forward(batch))


class _Recording:
    """One number of tokens.

    Attributes:
        rows, prefix_lens, extend_lens: [T] int64, see `BatchLayout`; 0 behind those of the batch's requests.
        positions, out_cache_loc, input_ids: [T] int64.
        attention: whose plan the recorded calls make and use.
        step: as others see it.
    """

    attention: StepAttention
    step: RecordedStep

    def __init__(self, size: int, slot_table: npt.NDArray[np.int32], last_ids: Int64s) -> None:
        """Make room.

        Args:
            slot_table, last_ids: written and looked up, respectively, between the rounds of a burst.
        """
        self.size = size
        self._slot_table = slot_table
        self._last_ids = last_ids
        self._numbers = np.zeros((6, size), dtype=np.int64)
        columns = torch.from_numpy(self._numbers)
        self.rows, self.prefix_lens, self.extend_lens = columns[:3]
        self.positions, self.out_cache_loc, self.input_ids = columns[3:]
        self._is_done = False

    def take(self, layout: BatchLayout, positions: Int64s, out_cache_loc: Int64s, input_ids: Int64s) -> None:
        """Bring a step's numbers where the recording reads them."""
        numbers, num = self._numbers, len(layout.rows)
        numbers[0, :num], numbers[1, :num], numbers[2, :num] = (
            layout.rows,
            layout.prefix_lens,
            layout.extend_lens,
        )
        numbers[:3, num:] = 0
        numbers[3], numbers[4], numbers[5] = positions, out_cache_loc, input_ids
        self._is_done = False

    def finish(self, program: NativeProgram | None, logits: Tensor) -> None:
        """The step has been computed; `program`: what does it again, if it could be recorded."""
        self._program = program
        self._is_done = True
        self.step = RecordedStep(
            self.rows,
            self.positions,
            self.out_cache_loc,
            self.input_ids,
            self._replay,
            logits,
            self._advance if program is not None else None,
        )

    def _advance(self, out_cache_loc: npt.NDArray[np.int32]) -> None:
        """See `RecordedStep`; of a step in which each request computes one token."""
        rows, prefix_lens, _, positions, loc, input_ids = self._numbers
        prefix_lens += 1
        positions += 1
        loc[:] = out_cache_loc
        input_ids[:] = self._last_ids[rows]
        self._slot_table[rows, positions] = out_cache_loc
        self._is_done = False

    def _replay(self) -> None:
        if not self._is_done:
            assert self._program is not None
            self._program.run()


def record_native_decodes(
    kernels: KernelConfig,
    *,
    model: CausalLM,
    kv_pool: KVPool,
    attention: AttentionBackend,
    relay: TokenRelay,
    req_to_token: Tensor,
    num_ranks: int,
) -> StepRecordings:
    """Recordings for the CPU, if the configuration wants them and attention can be recorded."""
    if kernels.cuda_graph is False:
        return NoRecordings()
    reason = ""
    if num_ranks > 1:
        reason = "ranks that share a model wait for each other within a step"
    elif not hasattr(attention, "repeatable_step"):
        reason = f"attention by {attention.name} is not a native call"
    if reason:
        logger.info("decode_recordings=none: %s", reason)
        return NoRecordings()
    largest = kernels.cuda_graph_max_bs
    return NativeRecordings(
        model=model,
        kv_pool=kv_pool,
        attention=cast("RepeatableAttention", attention),
        relay=relay,
        req_to_token=req_to_token,
        max_tokens=len(req_to_token) if largest == "auto" else largest,
        library=load_library(),
    )
