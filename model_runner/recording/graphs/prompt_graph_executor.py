"""`PromptGraphExecutor`: prompts, mixed steps and large decodes by CUDA graphs of some numbers of tokens.

A recording covers everything but attention, in one piece more than there are layers (`CutAttention`); a step uses the
next larger one. Attention is launched between the pieces by the plan of the step, for its own tokens only. Padding is
made of tokens of the dummy row in the dummy page; their result is not read. The rows that a step reads are selected
after the last piece, and head and sampler are launched as in any step.

The same idea as the breakable CUDA graphs of SGLang and the piecewise ones of vLLM.
"""

# Shapes: T tokens of a step, W of them need logits.

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...adapter_runs import runs_of
from ...forward_batch import StageStates
from ..executor import ReadRows, RecordedBytes, StepOutput
from .cut_attention import AttentionCall, AttentionMemory, CutAttention
from .decode_inputs import DecodeInputMemory
from .graph_sizes import RecordingCosts
from .recorded_forward import copy_result, empty_like, first_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ...adapter_runs import AdapterRuns
    from ...input_batch import InputBatch
    from ...memory.io_buffers import InputBuffers
    from ..eager_executor import EagerExecutor
    from ..graph_device import Cut, GraphDevice, Replay
    from .decode_inputs import DecodeInputs
    from .recorded_forward import ForwardResult, RecordedForward

logger = logging.getLogger(__name__)


class _Pieces(NamedTuple):
    """The recording of one number of tokens: its pieces, the attention between them, and the result."""

    pieces: list[Replay]
    calls: list[AttentionCall]
    result: ForwardResult


class PromptGraphExecutor:
    """A `StepExecutor` that replays steps of up to some number of tokens; `eager` runs larger ones.

    Attributes:
        eager: runs the other steps, and plans the attention of all.
        recorded_bytes: see `StepExecutor`.
        num_replayed: number of replayed steps.
    """

    recorded_decodes = None

    def __init__(
        self,
        *,
        eager: EagerExecutor,
        forward: RecordedForward,
        buffers: InputBuffers,
        sizes: Sequence[int],
        device: GraphDevice,
        records_adapters: bool = False,
    ) -> None:
        """Record the steps.

        Args:
            forward: of a model without state layers.
            sizes: numbers of tokens, ascending; see `token_sizes`.
            records_adapters: also record each size with adapters; otherwise such steps run eagerly.
        """
        assert forward.state_pool is None, "state layers depend on the requests of a step"
        self.eager = eager
        self.num_replayed = 0
        self._forward = forward
        self._buffers = buffers
        self._sizes = list(sizes)
        self._records_adapters = records_adapters
        num_rows, width = forward.slot_table.req_to_token.shape
        self._inputs = DecodeInputMemory(
            self._sizes,
            dummy_row=num_rows - 1,
            table_width=width,
            device=buffers.device,
            graph_device=device,
            has_adapters=records_adapters,
        )
        self._memory = AttentionMemory(self._sizes[-1])
        self._recordings, prompt_bytes = self._record(device)
        self.recorded_bytes = RecordedBytes(prompts=prompt_bytes)

    def run(self, batch: InputBatch) -> StepOutput:
        """Memory for inputs and plan is asked for twice, if the device has none."""
        num, has_adapters = batch.num_tokens, batch.adapter_slots is not None
        if num > self._sizes[-1] or (has_adapters and not self._records_adapters) or batch.images is not None:
            return self.eager.run(batch)
        size = self._sizes[bisect_left(self._sizes, num)]
        rows, adapters = self._buffers.retried(self._upload, size, batch)
        self.eager.link.receive(num)
        result = first_rows(self._replay(self._recordings[size, has_adapters], batch), num)
        self.num_replayed += 1
        if isinstance(result, StageStates):
            self.eager.link.send(result)
            return StepOutput(None, rows.sampled)
        wanted = rows.logits_indices
        hidden = result if wanted is None else result.index_select(0, wanted)
        return rows.output(self._forward.model, hidden, adapters)

    def _upload(self, size: int, batch: InputBatch) -> tuple[ReadRows, AdapterRuns | None]:
        """The rows that are read of the step's result, and their adapters."""
        slots = batch.adapter_slots
        self._inputs.upload(
            size,
            batch.token_rows,
            batch.positions,
            batch.out_cache_loc,
            batch.input_ids,
            slots,
            rope_positions=batch.rope_positions,
        )
        rows = ReadRows.of(batch, self._buffers.put_all(ReadRows.arrays(batch)))
        if slots is None:
            return rows, None
        for indices in (batch.logits_indices, batch.sample_indices):
            slots = slots if indices is None else slots[indices]
        return rows, runs_of(slots, self._buffers.put)

    def _replay(self, recording: _Pieces, batch: InputBatch) -> ForwardResult:
        first, *others = recording.pieces
        first()
        # Planned now: the first piece writes the slots of the step's tokens to the slot table.
        attention = self._buffers.retried(self.eager.attention.plan_step, batch.layout)
        buffers = self._memory.first(batch.num_tokens)
        for (layer_id, heads, sinks), piece in zip(recording.calls, others, strict=True):
            queries, attended = buffers[heads]
            attention.forward(layer_id, queries, sinks, attended)
            piece()
        return recording.result

    @torch.inference_mode()
    def _record(self, device: GraphDevice) -> tuple[dict[tuple[int, bool], _Pieces], list[int]]:
        """The recordings, and the device memory that each size took."""
        costs = RecordingCosts(device)
        largest = self._sizes[-1]
        # A pass that is not recorded allocates what all recordings share.
        uncut = CutAttention(self._memory, lambda: None)
        inputs = self._inputs.upload_padding(largest)
        all_results = empty_like(self._forward.run(inputs, lambda: uncut)[0])
        recordings: dict[tuple[int, bool], _Pieces] = {}
        for size in reversed(self._sizes):  # smaller recordings reuse the memory of the largest
            result = first_rows(all_results, size)
            for has_adapters in (True, False) if self._records_adapters else (False,):
                inputs = self._inputs.upload_padding(size, has_adapters=has_adapters)
                fill = partial(self._fill, result, inputs, has_adapters)
                recordings[size, has_adapters] = _Pieces(device.capture_pieces(fill), uncut.calls, result)
            costs.end_size()
        logger.info(
            "prompt_graphs=%d tokens=%d..%d pieces=%d %s",
            len(self._sizes),
            self._sizes[0],
            largest,
            len(uncut.calls) + 1,
            costs,
        )
        return recordings, costs.num_bytes

    def _fill(
        self, result: ForwardResult, inputs: DecodeInputs[Tensor], has_adapters: bool, cut: Cut
    ) -> None:
        """The recorded computation."""
        self._memory.clear_results(len(inputs.rows))
        attention = CutAttention(self._memory, cut)
        computed, _ = self._forward.run(inputs, lambda: attention, has_adapters=has_adapters)
        copy_result(result, computed)
