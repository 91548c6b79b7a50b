"""`CudaGraphExecutor`: decodes recorded for some batch sizes and replayed: one call instead of hundreds of launches.

A recording covers the step from its inputs (`DecodeInputMemory`) to the logits: slot table, input tokens (from the
`TokenRelay`, if they were sampled in the last step), model, head. The sampler runs after it, as in any step. A batch
uses the next larger recording. Padded rows compute a token of the dummy row in the dummy page; their result is not
read.

A step that verifies drafts is such a decode, too, of as many rows as it has tokens: a request with k drafts has 1 + k
rows of the table, one for each length. All keys are stored before attention, and each row attends to its own length
only, so a draft sees those before it. Keys of a request are then read once for each of its tokens.
"""

# Shapes: n requests of a recorded step, padding included; B of them real; V tokens of the vocabulary.

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from ...runtime.resolve.resolve import MAX_AUTO_GRAPH_BATCH
from ...runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from ..adapter_runs import AdapterBatch, AdapterRuns
from ..forward_batch import ForwardBatch, StageStates
from ..memory.state_pool import StateBatch, StatePool
from ..models.registry import logits_of
from ..states.state_runs import StateRuns
from .decode_inputs import DecodeInputMemory, DecodeInputs
from .executor import StepExecutor, StepOutput
from .graph_device import Replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...runtime.config.device_config import KernelConfig
    from ..attention.backend import CapturableAttention
    from ..input_batch import InputBatch
    from ..memory.kv_pool import KVPool
    from ..memory.slot_table import SlotTable
    from ..models.registry import CausalLM
    from ..token_relay import TokenRelay
    from .eager_executor import EagerExecutor
    from .graph_device import GraphDevice

logger = logging.getLogger(__name__)

_ALL_SIZES_UP_TO: Final = 8
_STEPS_PER_DOUBLING: Final = 4


def batch_sizes(max_batch_size: int) -> list[int]:
    """The sizes to record, ascending: 1 to 8, then four per doubling, so at most a fifth of a step is padding."""
    sizes = list(range(1, min(_ALL_SIZES_UP_TO, max_batch_size) + 1))
    while sizes[-1] < max_batch_size:
        last = sizes[-1]
        step = (1 << (last.bit_length() - 1)) // _STEPS_PER_DOUBLING
        sizes.append(min(last + step, max_batch_size))
    return sizes


class _Graph(NamedTuple):
    """The recording of one batch size: its inputs, the call that queues it, and the result that it writes."""

    inputs: DecodeInputs[Tensor]
    replay: Replay
    result: Tensor | StageStates


class CudaGraphExecutor:
    """A `StepExecutor` that replays decodes of all sizes up to a largest one; `eager` runs the other steps.

    Attributes:
        eager: runs the other steps.
        recorded_bytes: device memory that each recording took, the largest batch first.
        num_replayed: number of replayed steps.
    """

    def __init__(
        self,
        *,
        eager: EagerExecutor,
        model: CausalLM,
        kv_pool: KVPool,
        attention: CapturableAttention,
        relay: TokenRelay,
        slot_table: SlotTable,
        sizes: Sequence[int],
        device: GraphDevice,
        records_adapters: bool = False,
        state_pool: StatePool | None = None,
    ) -> None:
        """Record the decodes.

        Args:
            sizes: ascending; see `batch_sizes`.
            records_adapters: also record each size with adapters; otherwise such steps run eagerly.
        """
        self.eager = eager
        self.num_replayed = 0
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._relay = relay
        self._slot_table = slot_table.req_to_token.view(-1)
        self._sizes = list(sizes)
        self._records_adapters = records_adapters
        self._state_pool = state_pool
        num_rows, width = slot_table.req_to_token.shape
        self._inputs = DecodeInputMemory(
            self._sizes,
            dummy_row=num_rows - 1,
            table_width=width,
            device=slot_table.req_to_token.device,
            graph_device=device,
            has_adapters=records_adapters,
            has_states=state_pool is not None,
        )
        self._has_told = False
        self._graphs, self.recorded_bytes = self._record(device)

    def run(self, batch: InputBatch) -> StepOutput:
        """See `StepExecutor`. State layers are recorded for one token per request, so they verify drafts eagerly."""
        num = batch.num_tokens
        if not batch.samples_all or (batch.drafts is not None and self._state_pool is not None):
            return self.eager.run(batch)
        slots = batch.adapter_slots
        if slots is not None and not self._records_adapters:
            return self.eager.run(batch)
        if num > self._sizes[-1]:
            self._tell_of_larger_steps(num)
            return self.eager.run(batch)
        size = self._sizes[bisect_left(self._sizes, num)]
        self._inputs.upload(
            size,
            batch.token_rows,
            batch.positions,
            batch.out_cache_loc,
            batch.input_ids,
            slots,
            batch.state_plan,
        )
        graph, link = self._graphs[size, slots is not None], self.eager.link
        link.receive(num)
        graph.replay()
        self.num_replayed += 1
        rows = graph.inputs.rows[:num]
        if batch.drafts is not None:
            rows = rows.index_select(0, batch.drafts.firsts)
        result = _first_rows(graph.result, num)
        if isinstance(result, Tensor):
            return StepOutput(result, rows)
        link.send(result)
        return StepOutput(None, rows)

    def _tell_of_larger_steps(self, num_rows: int) -> None:
        if not self._has_told:
            self._has_told = True
            logger.info(
                "decodes of %d requests are launched kernel by kernel: --max-recorded-bs is %d (logged once)",
                num_rows,
                self._sizes[-1],
            )

    @torch.inference_mode()
    def _record(self, device: GraphDevice) -> tuple[dict[tuple[int, bool], _Graph], list[int]]:
        """The recordings, and the device memory that each took."""
        free_bytes, started_s = [device.free_bytes()], time.perf_counter()
        largest = self._sizes[-1]
        # One result for all sizes: the other recordings could not reuse the memory of a recording's own result.
        all_results = _like(self._compute(self._inputs.upload_padding(largest)))
        graphs: dict[tuple[int, bool], _Graph] = {}
        for size in reversed(self._sizes):  # smaller recordings reuse the memory of the largest
            result = _first_rows(all_results, size)
            for has_adapters in (True, False) if self._records_adapters else (False,):
                inputs = self._inputs.upload_padding(size, has_adapters=has_adapters)
                replay = device.capture(partial(self._fill, result, inputs, has_adapters=has_adapters))
                graphs[size, has_adapters] = _Graph(inputs, replay, result)
            free_bytes.append(device.free_bytes())
        recorded_bytes = [before - after for before, after in pairwise(free_bytes)]
        logger.info(
            "decode_graphs=%d batch_sizes=%d..%d record_s=%.1f graphs_mib=%.0f",
            len(self._sizes),
            self._sizes[0],
            largest,
            time.perf_counter() - started_s,
            sum(recorded_bytes) / (1 << 20),
        )
        return graphs, recorded_bytes

    def _fill(
        self, result: Tensor | StageStates, inputs: DecodeInputs[Tensor], *, has_adapters: bool
    ) -> None:
        """The recorded computation: [n, V] logits of a step, or what the next pipeline stage gets."""
        hidden, adapters = self._forward(inputs, has_adapters=has_adapters)
        if isinstance(hidden, StageStates):
            assert isinstance(result, StageStates), "a stage has results of one kind"
            result.x.copy_(hidden.x)
            result.residual.copy_(hidden.residual)
        else:
            assert isinstance(result, Tensor), "a stage has results of one kind"
            self._model.write_logits(hidden, adapters, result)

    def _compute(self, inputs: DecodeInputs[Tensor]) -> Tensor | StageStates:
        """The same in memory of its own."""
        hidden, adapters = self._forward(inputs)
        return hidden if isinstance(hidden, StageStates) else logits_of(self._model, hidden, adapters)

    def _forward(
        self, inputs: DecodeInputs[Tensor], *, has_adapters: bool = False
    ) -> tuple[Tensor | StageStates, AdapterRuns | None]:
        """The model's result, and the adapters of its rows. It depends only on the shapes of the host's arrays."""
        self._slot_table.index_copy_(0, inputs.table_indices, inputs.slots)
        adapters = None
        if has_adapters:
            runs = AdapterRuns.recorded(inputs.adapter_plan)
            adapters = AdapterBatch(runs, runs, runs)
        batch = ForwardBatch(
            input_ids=self._relay.input_ids(inputs.known_ids, inputs.rows),
            positions=inputs.positions,
            kv_pool=self._kv_pool,
            out_cache_loc=inputs.out_cache_loc,
            attention=self._attention.decode_step(inputs.rows, inputs.seq_lens),
            adapters=adapters,
            states=None
            if self._state_pool is None
            else StateBatch(self._state_pool, StateRuns(inputs.state_plan)),
            incoming=self.eager.link.incoming(len(inputs.rows)),
        )
        return self._model.forward(batch), None if adapters is None else adapters.sampled


def _first_rows(result: Tensor | StageStates, num: int) -> Tensor | StageStates:
    if isinstance(result, Tensor):
        return result[:num]
    return StageStates(result.x[:num], result.residual[:num])


def _like(result: Tensor | StageStates) -> Tensor | StageStates:
    if isinstance(result, Tensor):
        return torch.empty_like(result)
    return StageStates(torch.empty_like(result.x), torch.empty_like(result.residual))


def sizes_to_record(
    kernels: KernelConfig, num_rows: int, device: torch.device, max_drafts: int = 0
) -> list[int]:
    """The batch sizes to record as CUDA graphs by the configuration, ascending; empty on other devices.

    Args:
        num_rows: requests that may run.
        max_drafts: of one request in a step, whose tokens are rows, too; 0: steps have no drafts, or are not replayed.
    """
    if kernels.record_steps is False or device.type != "cuda":
        return []
    asked, most = kernels.max_recorded_bs, min(num_rows, MAX_AUTO_GRAPH_BATCH)
    largest = most if asked == "auto" else min(num_rows, asked)
    if max_drafts and largest >= most:  # else the user wants smaller recordings
        largest = max(largest, min(num_rows * (1 + max_drafts), MAX_DRAFT_STEP_TOKENS))
    return batch_sizes(largest)


def cuda_graph_executor(
    sizes: Sequence[int],
    eager: EagerExecutor,
    *,
    model: CausalLM,
    kv_pool: KVPool,
    relay: TokenRelay,
    slot_table: SlotTable,
    make_device: Callable[[], GraphDevice],
    records_adapters: bool = False,
    state_pool: StatePool | None = None,
) -> StepExecutor:
    """Record decodes of these batch sizes if the attention can be recorded; otherwise `eager` runs all steps."""
    attention = eager.attention.capturable()
    if not sizes:
        return eager
    if attention is None:
        # Not an error: a resolved configuration says "on" also if the user has not asked for recordings.
        logger.warning(
            "decode_graphs=0: attention by %s needs the host in each step; decodes are slower than with another "
            "--attention-backend",
            eager.attention.name,
        )
        return eager
    return CudaGraphExecutor(
        eager=eager,
        model=model,
        kv_pool=kv_pool,
        attention=attention,
        relay=relay,
        slot_table=slot_table,
        sizes=sizes,
        device=make_device(),
        records_adapters=records_adapters,
        state_pool=state_pool,
    )
