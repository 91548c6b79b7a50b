"""`CudaGraphExecutor`: decodes recorded for some batch sizes and replayed: one call instead of hundreds of launches.

A recording covers the step from its inputs (`DecodeInputMemory`) to the logits: slot table, input tokens (from the
`TokenRelay`, if they were sampled in the last step), model, head. The sampler runs after it, as in any step; it may
have recordings of its own (`RecordedSampler`). A batch uses the next larger recording. Padded rows compute a token of
the dummy row in the dummy page; their result is not read.

A step that verifies drafts is such a decode, too, of as many rows as it has tokens: a request with k drafts has 1 + k
rows of the table, one for each length. All keys are stored before attention, and each row attends to its own length
only, so a draft sees those before it. Keys of a request are then read once for each of its tokens.
"""

# Shapes: n requests of a recorded step, padding included; B of them real; V tokens of the vocabulary.

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...structures.causal_lm import logits_of
from ..executor import RecordedBytes, RecordedDecodes, StepExecutor, StepOutput
from ..graph_device import Replay
from .decode_inputs import DecodeInputMemory, DecodeInputs
from .graph_sizes import RecordingCosts
from .prompt_graph_executor import PromptGraphExecutor
from .recorded_forward import ForwardResult, RecordedForward, copy_result, empty_like, first_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...adapter_runs import AdapterRuns
    from ...attention.backend import CapturableAttention
    from ...distributed.tp_group import TPGroup
    from ...input_batch import InputBatch
    from ...memory.io_buffers import InputBuffers
    from ..eager_executor import EagerExecutor
    from ..graph_device import GraphDevice
    from .graph_sizes import GraphSizes

logger = logging.getLogger(__name__)


class _Graph(NamedTuple):
    """The recording of one batch size: its inputs, the call that queues it, and the result that it writes."""

    inputs: DecodeInputs[Tensor]
    replay: Replay
    result: ForwardResult


class CudaGraphExecutor:
    """A `StepExecutor` that replays decodes of all sizes up to a largest one; `others` runs the other steps.

    Attributes:
        eager: runs steps without recordings.
        others: runs steps that are not such decodes, with or without recordings.
        recorded_bytes, recorded_decodes: see `StepExecutor`.
        num_replayed: number of replayed steps.
    """

    def __init__(
        self,
        *,
        eager: EagerExecutor,
        others: EagerExecutor | PromptGraphExecutor,
        forward: RecordedForward,
        attention: CapturableAttention,
        sizes: Sequence[int],
        device: GraphDevice,
        records_adapters: bool = False,
    ) -> None:
        """Record the decodes.

        Args:
            sizes: numbers of rows, ascending; see `batch_sizes`.
            records_adapters: also record each size with adapters; otherwise such steps run eagerly.
        """
        self.eager = eager
        self.others = others
        self.num_replayed = 0
        self._forward = forward
        self._attention = attention
        self._sizes = list(sizes)
        self._records_adapters = records_adapters
        self._has_states = forward.state_pool is not None
        table = forward.slot_table.req_to_token
        num_rows, width = table.shape
        self._inputs = DecodeInputMemory(
            self._sizes,
            dummy_row=num_rows - 1,
            table_width=width,
            device=table.device,
            graph_device=device,
            has_adapters=records_adapters,
            has_states=self._has_states,
        )
        self._has_told = False
        self._graphs, decode_bytes = self._record(device)
        self.recorded_bytes = RecordedBytes(decode_bytes, others.recorded_bytes.prompts)
        self.recorded_decodes: RecordedDecodes | None = None
        result = self._graphs[self._sizes[-1], False].result
        if isinstance(result, Tensor):
            self.recorded_decodes = RecordedDecodes(result, self._sizes, device)

    def run(self, batch: InputBatch) -> StepOutput:
        """State layers are recorded for one token per request, so they verify drafts eagerly."""
        num = batch.num_tokens
        if not batch.samples_all or (batch.drafts is not None and self._has_states):
            return self.others.run(batch)
        slots = batch.adapter_slots
        if slots is not None and not self._records_adapters:
            return self.others.run(batch)
        if num > self._sizes[-1]:
            self._tell_of_larger_steps(num)
            return self.others.run(batch)
        size = self._sizes[bisect_left(self._sizes, num)]
        self._inputs.upload(
            size,
            batch.token_rows,
            batch.positions,
            batch.out_cache_loc,
            batch.input_ids,
            slots,
            batch.state_plan,
            batch.rope_positions,
        )
        graph, link = self._graphs[size, slots is not None], self.eager.link
        link.receive(num)
        graph.replay()
        self.num_replayed += 1
        rows = graph.inputs.rows[:num]
        if batch.drafts is not None:
            rows = rows.index_select(0, batch.drafts.firsts)
        result = first_rows(graph.result, num)
        if isinstance(result, Tensor):
            return StepOutput(result, rows)
        link.send(result)
        return StepOutput(None, rows)

    def _tell_of_larger_steps(self, num_rows: int) -> None:
        if not self._has_told:
            self._has_told = True
            logger.info(
                "decodes of %d requests are not replayed as a whole: --max-recorded-bs is %d (logged once)",
                num_rows,
                self._sizes[-1],
            )

    @torch.inference_mode()
    def _record(self, device: GraphDevice) -> tuple[dict[tuple[int, bool], _Graph], list[int]]:
        """The recordings, and the device memory that each took."""
        costs = RecordingCosts(device)
        largest = self._sizes[-1]
        # One result for all sizes: the other recordings could not reuse the memory of a recording's own result.
        all_results = empty_like(self._compute(self._inputs.upload_padding(largest)))
        graphs: dict[tuple[int, bool], _Graph] = {}
        for size in reversed(self._sizes):  # smaller recordings reuse the memory of the largest
            result = first_rows(all_results, size)
            for has_adapters in (True, False) if self._records_adapters else (False,):
                inputs = self._inputs.upload_padding(size, has_adapters=has_adapters)
                replay = device.capture(partial(self._fill, result, inputs, has_adapters=has_adapters))
                graphs[size, has_adapters] = _Graph(inputs, replay, result)
            costs.end_size()
        logger.info(
            "decode_graphs=%d batch_sizes=%d..%d %s", len(self._sizes), self._sizes[0], largest, costs
        )
        return graphs, costs.num_bytes

    def _fill(self, result: ForwardResult, inputs: DecodeInputs[Tensor], *, has_adapters: bool) -> None:
        """The recorded computation: [n, V] logits of a step, or what the next pipeline stage gets."""
        hidden, adapters = self._run(inputs, has_adapters=has_adapters)
        if isinstance(hidden, Tensor):
            assert isinstance(result, Tensor), "a stage has results of one kind"
            self._forward.model.write_logits(hidden, adapters, result)
        else:
            copy_result(result, hidden)

    def _compute(self, inputs: DecodeInputs[Tensor]) -> ForwardResult:
        """The same in memory of its own."""
        hidden, adapters = self._run(inputs)
        if isinstance(hidden, Tensor):
            return logits_of(self._forward.model, hidden, adapters)
        return hidden

    def _run(
        self, inputs: DecodeInputs[Tensor], *, has_adapters: bool = False
    ) -> tuple[ForwardResult, AdapterRuns | None]:
        """The model's result, and the adapters of its rows. It depends only on the shapes of the host's arrays."""
        attention = partial(self._attention.decode_step, inputs.rows, inputs.seq_lens)
        return self._forward.run(inputs, attention, has_adapters=has_adapters)


def cuda_graph_executor(
    sizes: GraphSizes,
    eager: EagerExecutor,
    *,
    forward: RecordedForward,
    buffers: InputBuffers,
    make_device: Callable[[], GraphDevice],
    group: TPGroup,
    records_adapters: bool = False,
) -> StepExecutor:
    """Record steps of these sizes; `eager` runs the others, and decodes if their attention cannot be recorded.

    All ranks record the same, because they add up whole steps with the padding. What a rank cannot record (a machine
    has no compiler for the kernels), no rank does.
    """
    if not sizes.decodes and not sizes.prompts:
        return eager
    records_adapters = _all_ranks(group, records_adapters)
    device = make_device()
    others: EagerExecutor | PromptGraphExecutor = eager
    if sizes.prompts:  # first, because they are larger, and all recordings share their memory
        others = PromptGraphExecutor(
            eager=eager,
            forward=forward,
            buffers=buffers,
            sizes=sizes.prompts,
            device=device,
            records_adapters=records_adapters,
        )
    attention = eager.attention.capturable()
    if not sizes.decodes:
        return others
    all_can = _all_ranks(group, attention is not None)
    if attention is None:
        # Not an error: a resolved configuration says "on" also if the user has not asked for recordings.
        logger.warning(
            "decode_graphs=0: attention by %s needs the host in each step; decodes are slower than with another "
            "--attention-backend",
            eager.attention.name,
        )
        return others
    if not all_can:
        logger.warning("decode_graphs=0: decodes of another rank cannot be recorded, see its log")
        return others
    return CudaGraphExecutor(
        eager=eager,
        others=others,
        forward=forward,
        attention=attention,
        sizes=sizes.decodes,
        device=device,
        records_adapters=records_adapters,
    )


def _all_ranks(group: TPGroup, can: bool) -> bool:
    return bool(group.min_over_ranks(int(can)))
