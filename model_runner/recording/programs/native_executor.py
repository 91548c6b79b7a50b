"""`NativeExecutor`: runs a decode on the CPU as one call to our library; the counterpart of `CudaGraphExecutor`.

A number of tokens is recorded when it first occurs, without padding. The recording computes that step, so it costs
hardly more than the step. There is no work at start, and none for sizes that never occur. The tokens may be one of each
request, or several of a request with drafts: the attention plan holds this, and each replay makes the plan again.

Host and device share memory, so input tokens and slot table are updated before the replay. The recording covers the
rest of the step, up to the logits.
"""

# Shapes: T tokens of a step.

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...adapter_runs import AdapterBatch, AdapterRuns, recorded_plan, write_plan
from ...distributed.pp_link import NO_LINK
from ...forward_batch import FeaturedStates, ForwardBatch, StageStates
from ...kernels.cpu.library import load_library
from ...memory.state_pool import StateBatch, StatePool
from ...states.state_runs import StateRuns, recorded_state_plan
from ...structures.causal_lm import logits_of
from ..executor import RecordedBytes, StepExecutor, StepFeatures, StepOutput
from .arena import Arena
from .native_program import NativeProgram, record

if TYPE_CHECKING:
    import ctypes

    from ....runtime.config.device_config import KernelConfig
    from ...attention.backend import RepeatableAttention
    from ...distributed.pp_link import StageLink
    from ...input_batch import InputBatch, Int64s
    from ...memory.kv_pool import KVPool
    from ...memory.slot_table import SlotTable
    from ...request_states import TokenRelay
    from ...structures.causal_lm import CausalLM
    from ..eager_executor import EagerExecutor

logger = logging.getLogger(__name__)

_Result = Tensor | StageStates | FeaturedStates


class NativeExecutor:
    """A `StepExecutor` with recordings of all numbers of tokens seen so far; `eager` runs the other steps.

    Attributes:
        eager: runs the other steps.
        arena: memory of the intermediate tensors of all recordings.
        reason_against: why this model cannot be recorded, set when that is known.
        reason_against_adapters: the same for steps with adapters.
        num_replayed: number of replayed steps, without the recorded ones.
    """

    recorded_bytes = RecordedBytes()
    recorded_decodes = None

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
        state_pool: StatePool | None = None,
        link: StageLink = NO_LINK,
    ) -> None:
        """Take the parts; steps of more than `max_tokens` are not recorded."""
        self.eager = eager
        self.arena = Arena()
        self.reason_against = ""
        self.reason_against_adapters = ""
        self.num_replayed = 0
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._last_ids = relay.on_host()
        self._slot_table = slot_table.req_to_token.numpy()
        self._max_tokens = max_tokens
        self._library = library
        self._state_pool = state_pool
        self._link = link
        self._recordings: dict[tuple[int, bool], _Recording] = {}

    @property
    def recorded_sizes(self) -> list[int]:
        """The numbers of tokens that have a recording without adapters, ascending."""
        return sorted(size for size, has_adapters in self._recordings if not has_adapters)

    def run(self, batch: InputBatch) -> StepOutput:
        """Recording the first step of a size computes it."""
        has_adapters = batch.adapter_slots is not None
        reason_against = self.reason_against_adapters if has_adapters else self.reason_against
        if not batch.samples_all or batch.num_tokens > self._max_tokens or reason_against:
            return self.eager.run(batch)
        rows = batch.token_rows
        self._slot_table[rows, batch.positions] = batch.out_cache_loc
        input_ids = np.where(batch.input_ids < 0, self._last_ids[rows], batch.input_ids)
        recording = self._recordings.get((batch.num_tokens, has_adapters))
        if recording is None:
            return self._record(batch, input_ids)
        recording.numbers.take(batch, input_ids)
        self._link.receive(batch.num_tokens)
        recording.program.run()
        self.num_replayed += 1
        return self._output(recording.numbers, batch, recording.result)

    def _output(self, numbers: _Numbers, batch: InputBatch, result: _Result) -> StepOutput:
        """The output of a step in which every request samples."""
        rows = numbers.rows_of(batch)
        if isinstance(result, FeaturedStates):
            positions = (
                numbers.positions if batch.rope_positions is None else torch.from_numpy(batch.positions)
            )
            features = StepFeatures(numbers.input_ids, positions, numbers.out_cache_loc, result.features)
            return StepOutput(result.hidden, rows, features=features)
        if isinstance(result, Tensor):
            return StepOutput(result, rows)
        self._link.send(result)
        return StepOutput(None, rows)

    def _record(self, batch: InputBatch, input_ids: Int64s) -> StepOutput:
        """Compute the step and keep its recording, if there is one."""
        started_s, size = time.perf_counter(), batch.num_tokens
        has_adapters = batch.adapter_slots is not None
        numbers = _Numbers(size, has_adapters=has_adapters, state_pool=self._state_pool)
        numbers.take(batch, input_ids)
        self._link.receive(size)
        recorded = record(self._library, self.arena, lambda: self._compute(numbers))
        program, result = recorded.program, recorded.result
        if program is None:
            if has_adapters:
                self.reason_against_adapters = recorded.reason_against
            else:
                self.reason_against = recorded.reason_against
            what = " of steps with adapters" if has_adapters else ""
            logger.info("decode_recordings=none%s: not recordable: %s", what, recorded.reason_against)
            return self._output(numbers, batch, result)
        if not self._recordings:
            logger.debug(
                "decode_recordings=native calls=%d tokens=%d arena_mib=%.1f record_ms=%.0f "
                "(logged once; other sizes are recorded when they occur)",
                program.num_calls,
                size,
                self.arena.num_bytes / (1 << 20),
                (time.perf_counter() - started_s) * 1e3,
            )
        self._recordings[size, has_adapters] = _Recording(numbers, program, result)
        return self._output(numbers, batch, result)

    def _compute(self, numbers: _Numbers) -> _Result:
        """[T, V] logits, or what the next stage gets; this is recorded, including the planning of attention."""
        batch = ForwardBatch(
            input_ids=numbers.input_ids,
            positions=numbers.positions,
            kv_pool=self._kv_pool,
            out_cache_loc=numbers.out_cache_loc,
            attention=self._attention.repeatable_step(numbers.rows, numbers.prefix_lens, numbers.extend_lens),
            adapters=numbers.adapters,
            states=numbers.states,
            incoming=self._link.incoming(len(numbers.rows)),
        )
        hidden = self._model.forward(batch)
        if isinstance(hidden, StageStates):
            return hidden
        hidden, features = hidden if isinstance(hidden, FeaturedStates) else (hidden, hidden)
        logits = logits_of(self._model, hidden, None if batch.adapters is None else batch.adapters.sampled)
        return FeaturedStates(logits, features) if self.eager.keeps_features else logits


class _Numbers:
    """The inputs that differ between steps of T tokens, in fixed memory.

    Attributes:
        rows, prefix_lens, extend_lens: [T] int64, see `BatchLayout`; 0 after the entries of the batch's requests.
        positions, out_cache_loc, input_ids: [T] int64; the positions are those by which heads turn.
        adapters: None without adapters.
        states: None without state layers.
    """

    def __init__(self, size: int, *, has_adapters: bool = False, state_pool: StatePool | None = None) -> None:
        self._columns = np.zeros((6, size), dtype=np.int64)
        columns = torch.from_numpy(self._columns)
        self.rows, self.prefix_lens, self.extend_lens = columns[:3]
        self.positions, self.out_cache_loc, self.input_ids = columns[3:]
        self.adapters: AdapterBatch | None = None
        if has_adapters:
            runs = AdapterRuns.recorded(recorded_plan(size))
            self.adapters = AdapterBatch(runs, runs, runs)
        self.states: StateBatch | None = None
        if state_pool is not None:
            self.states = StateBatch(state_pool, StateRuns(recorded_state_plan(size)))

    def take(self, batch: InputBatch, input_ids: Int64s) -> None:
        """Copy a step's inputs to the memory that its recording reads."""
        columns, layout = self._columns, batch.layout
        num = len(layout.rows)
        columns[0, :num], columns[1, :num], columns[2, :num] = (
            layout.rows,
            layout.prefix_lens,
            layout.extend_lens,
        )
        columns[:3, num:] = 0
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        columns[3], columns[4], columns[5] = positions, batch.out_cache_loc, input_ids
        if self.adapters is not None:
            assert batch.adapter_slots is not None
            write_plan(self.adapters.tokens.plan.numpy(), batch.adapter_slots)
        if self.states is not None:
            assert batch.state_plan is not None
            self.states.runs.plan.numpy()[: len(batch.state_plan)] = batch.state_plan

    def rows_of(self, batch: InputBatch) -> Tensor:
        """[B] int64, the rows of the step's requests."""
        num = len(batch.layout.rows)
        rows: Tensor = self.rows
        return rows if num == len(rows) else rows[:num]


class _Recording(NamedTuple):
    """The recording of one number of tokens, with or without adapters.

    Attributes:
        numbers: the inputs that the program reads.
        result: the memory to which the program writes, [T, V] float32 logits or what the next pipeline stage gets;
            valid until the next run of any recording.
    """

    numbers: _Numbers
    program: NativeProgram
    result: _Result


def native_executor(
    kernels: KernelConfig,
    eager: EagerExecutor,
    *,
    model: CausalLM,
    kv_pool: KVPool,
    relay: TokenRelay,
    slot_table: SlotTable,
    num_ranks: int,
    state_pool: StatePool | None = None,
) -> StepExecutor:
    """A `NativeExecutor` if the configuration enables it and attention can be recorded; otherwise `eager`."""
    if kernels.record_steps is False:
        return eager
    if num_ranks > 1:
        logger.info("decode_recordings=none: tensor-parallel ranks wait for each other within a step")
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
        state_pool=state_pool,
        link=eager.link,
    )
