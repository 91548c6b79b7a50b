"""`NativeExecutor`: decodes on the CPU as one call to our library each; the sister of `CudaGraphExecutor`.

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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..forward_batch import ForwardBatch
from ..kernels.cpu.library import load_library
from .arena import Arena
from .executor import StepExecutor, StepOutput
from .native_program import NativeProgram, record

if TYPE_CHECKING:
    import ctypes

    from ...runtime.config.device_config import KernelConfig
    from ..attention.backend import RepeatableAttention
    from ..input_batch import InputBatch, Int64s
    from ..memory.kv_pool import KVPool
    from ..memory.slot_table import SlotTable
    from ..models.registry import CausalLM
    from ..token_relay import TokenRelay
    from .eager_executor import EagerExecutor

logger = logging.getLogger(__name__)


class NativeExecutor:
    """A `StepExecutor` with recordings of all numbers of tokens met so far; it leaves other steps to `eager`.

    Attributes:
        eager: runs the other steps.
        arena: what all recordings work in.
        reason_against: what cannot be recorded of this model, once that is known.
        num_replayed: steps that were replayed; those that were recorded are not among them.
    """

    recorded_bytes = ()

    def __init__(
        self,
        *,
        eager: EagerExecutor,
        model: CausalLM,
        kv_pool: KVPool,
        attention: RepeatableAttention,
        relay: TokenRelay,
        slot_table: SlotTable,
        max_tokens: int,
        library: ctypes.CDLL,
    ) -> None:
        """`max_tokens`: larger steps are not recorded."""
        self.eager = eager
        self.arena = Arena()
        self.reason_against = ""
        self.num_replayed = 0
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._last_ids = relay.on_host()
        self._slot_table = slot_table.req_to_token.numpy()
        self._max_tokens = max_tokens
        self._library = library
        self._recordings: dict[int, _Recording] = {}

    @property
    def recorded_sizes(self) -> list[int]:
        """The numbers of tokens that have a recording, ascending."""
        return sorted(self._recordings)

    def run(self, batch: InputBatch) -> StepOutput:
        """See `StepExecutor`. Recording the first step of a size computes it."""
        if not batch.samples_all or batch.num_tokens > self._max_tokens or self.reason_against:
            return self.eager.run(batch)
        rows = batch.token_rows
        self._slot_table[rows, batch.positions] = batch.out_cache_loc
        input_ids = np.where(batch.input_ids < 0, self._last_ids[rows], batch.input_ids)
        recording = self._recordings.get(batch.num_tokens)
        if recording is None:
            return self._record(batch, input_ids)
        recording.numbers.take(batch, input_ids)
        recording.program.run()
        self.num_replayed += 1
        return recording.numbers.output(batch, recording.logits)

    def _record(self, batch: InputBatch, input_ids: Int64s) -> StepOutput:
        """Compute the step, and keep what can be kept of that."""
        started_s, size = time.perf_counter(), batch.num_tokens
        numbers = _Numbers(size)
        numbers.take(batch, input_ids)
        recorded = record(self._library, self.arena, lambda: self._compute(numbers))
        program, logits = recorded.program, recorded.result
        if program is None:
            self.reason_against = recorded.reason_against
            logger.info("decode_recordings=none: not recordable: %s", recorded.reason_against)
            return numbers.output(batch, logits)
        if not self._recordings:
            logger.info(
                "decode_recordings=native calls=%d tokens=%d arena_mib=%.1f record_ms=%.0f "
                "(said once; other sizes follow when they come)",
                program.num_calls,
                size,
                self.arena.num_bytes / (1 << 20),
                (time.perf_counter() - started_s) * 1e3,
            )
        self._recordings[size] = _Recording(numbers, program, logits)
        return numbers.output(batch, logits)

    def _compute(self, numbers: _Numbers) -> Tensor:
        """[T, V] logits; what is recorded, the planning of attention included."""
        batch = ForwardBatch(
            input_ids=numbers.input_ids,
            positions=numbers.positions,
            kv_pool=self._kv_pool,
            out_cache_loc=numbers.out_cache_loc,
            attention=self._attention.repeatable_step(numbers.rows, numbers.prefix_lens, numbers.extend_lens),
        )
        return self._model.logits(self._model.forward(batch))


class _Numbers:
    """The numbers of a step of T tokens, in memory that stays: what one step has and another has not.

    Attributes:
        rows, prefix_lens, extend_lens: [T] int64, see `BatchLayout`; 0 after those of the batch's requests.
        positions, out_cache_loc, input_ids: [T] int64.
    """

    def __init__(self, size: int) -> None:
        self._columns = np.zeros((6, size), dtype=np.int64)
        columns = torch.from_numpy(self._columns)
        self.rows, self.prefix_lens, self.extend_lens = columns[:3]
        self.positions, self.out_cache_loc, self.input_ids = columns[3:]

    def take(self, batch: InputBatch, input_ids: Int64s) -> None:
        """Copy a step's numbers to where its recording reads them."""
        columns, layout = self._columns, batch.layout
        num = len(layout.rows)
        columns[0, :num], columns[1, :num], columns[2, :num] = (
            layout.rows,
            layout.prefix_lens,
            layout.extend_lens,
        )
        columns[:3, num:] = 0
        columns[3], columns[4], columns[5] = batch.positions, batch.out_cache_loc, input_ids

    def output(self, batch: InputBatch, logits: Tensor) -> StepOutput:
        """What a step gives whose numbers these are: each of its requests samples."""
        num = len(batch.layout.rows)
        return StepOutput(logits, self.rows if num == len(self.rows) else self.rows[:num])


class _Recording(NamedTuple):
    """One number of tokens.

    Attributes:
        numbers: what the program reads.
        logits: [T, V] float32, where the program leaves them until the next run of any.
    """

    numbers: _Numbers
    program: NativeProgram
    logits: Tensor


def native_executor(
    kernels: KernelConfig,
    eager: EagerExecutor,
    *,
    model: CausalLM,
    kv_pool: KVPool,
    relay: TokenRelay,
    slot_table: SlotTable,
    num_ranks: int,
) -> StepExecutor:
    """Recordings for the CPU, if the configuration wants them and attention can be recorded; otherwise `eager`."""
    if kernels.record_steps is False:
        return eager
    if num_ranks > 1:
        logger.info("decode_recordings=none: ranks that share a model wait for each other within a step")
        return eager
    attention = eager.attention.repeatable()
    if attention is None:
        logger.info("decode_recordings=none: attention by %s is not a native call", eager.attention.name)
        return eager
    largest = kernels.max_recorded_bs
    return NativeExecutor(
        eager=eager,
        model=model,
        kv_pool=kv_pool,
        attention=attention,
        relay=relay,
        slot_table=slot_table,
        max_tokens=len(slot_table.req_to_token) if largest == "auto" else largest,
        library=load_library(),
    )
