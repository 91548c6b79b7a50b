"""`DecodeGraphs`: decode steps, recorded for some batch sizes and replayed: one call instead of hundreds of launches.

A recording reaches from the step's numbers (`DecodeInputMemory`) to the logits: slot table, input tokens (which the
`TokenRelay` has, where they were sampled in the last step), model, head. The sampler comes behind it, as in any step. A
batch takes the next larger recording; padded rows compute a token of the dummy row, in the dummy page, and nobody looks
at what comes of it.
"""

# Shapes: n requests of a recorded step, padding included; B of them real; V tokens of the vocabulary.

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ...runtime.resolve.resolve import MAX_AUTO_GRAPH_BATCH
from ...runtime.step_plan import ForwardMode
from ..forward_batch import ForwardBatch
from ..sampling.sampling_batch import SamplingBatch
from .decode_inputs import DecodeInputMemory
from .recorded_step import NoRecordings, RecordedStep, StepRecordings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...runtime.config.device_config import KernelConfig
    from ..attention.backend import AttentionBackend, BatchLayout, CapturableAttention
    from ..memory.kv_pool import KVPool
    from ..models.registry import CausalLM
    from ..token_relay import TokenRelay
    from .decode_inputs import DecodeInputs, Int64s
    from .graph_device import GraphDevice

logger = logging.getLogger(__name__)

_ALL_SIZES_UP_TO: Final = 8
_STEPS_PER_DOUBLING: Final = 4


def batch_sizes(max_batch_size: int) -> list[int]:
    """The sizes to record, ascending: 1 to 8, then four per doubling, so that at most a fifth of a step is padding."""
    sizes = list(range(1, min(_ALL_SIZES_UP_TO, max_batch_size) + 1))
    while sizes[-1] < max_batch_size:
        last = sizes[-1]
        step = (1 << (last.bit_length() - 1)) // _STEPS_PER_DOUBLING
        sizes.append(min(last + step, max_batch_size))
    return sizes


class Replayed:
    """The attention of a batch that is replayed: it is part of the recording."""

    def forward(self, layer_id: int, q: Tensor) -> Tensor:
        """Never called."""
        raise AssertionError("this step is replayed; its attention is in the recording")


class DecodeGraphs:
    """Recordings for all sizes up to a largest one.

    Attributes:
        recorded_bytes: what each recording took of the device, the largest first.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_pool: KVPool,
        attention: CapturableAttention,
        relay: TokenRelay,
        req_to_token: Tensor,
        sizes: Sequence[int],
        device: GraphDevice,
    ) -> None:
        """Record.

        Args:
            req_to_token: the slot table; its last row is the dummy row, which nobody else writes.
            sizes: ascending; see `batch_sizes`.
        """
        self._model = model
        self._kv_pool = kv_pool
        self._attention = attention
        self._relay = relay
        self._slot_table = req_to_token.view(-1)
        self._sizes = list(sizes)
        num_rows, width = req_to_token.shape
        torch_device = req_to_token.device
        self._inputs = DecodeInputMemory(
            self._sizes,
            dummy_row=num_rows - 1,
            table_width=width,
            device=torch_device,
            graph_device=device,
        )
        self._steps: dict[int, RecordedStep] = {}
        self._has_told = False
        self.recorded_bytes: list[int] = []
        self._record(device)

    def ready(
        self, rows: Int64s, positions: Int64s, out_cache_loc: Int64s, known_ids: Int64s
    ) -> RecordedStep | None:
        """See `StepRecordings`."""
        if len(rows) > self._sizes[-1]:
            self._tell_of_larger_steps(len(rows))
            return None
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        self._inputs.upload(size, rows, positions, out_cache_loc, known_ids)
        return self._steps[size].without_padding(len(rows))

    def ready_tokens(
        self, layout: BatchLayout, positions: Tensor, out_cache_loc: Tensor, input_ids: Tensor
    ) -> RecordedStep | None:
        """See `StepRecordings`: none, because attention is recorded for one token of each request."""
        return None

    def _tell_of_larger_steps(self, num_rows: int) -> None:
        if not self._has_told:
            self._has_told = True
            logger.info(
                "decodes of %d requests are launched kernel by kernel: --max-recorded-bs is %d (said once)",
                num_rows,
                self._sizes[-1],
            )

    @torch.inference_mode()
    def _record(self, device: GraphDevice) -> None:
        free_bytes, started_s = [device.free_bytes()], time.perf_counter()
        largest = self._sizes[-1]
        # One for all sizes: a recording's own result would keep its memory from the others.
        all_logits = torch.empty_like(self._compute(self._inputs.upload_padding(largest), largest))
        for size in reversed(self._sizes):  # the smaller ones find their memory in what the largest needed
            inputs, logits = self._inputs.upload_padding(size), all_logits[:size]
            replay = device.capture(partial(self._fill, logits, inputs))
            self._steps[size] = RecordedStep(
                inputs.rows, inputs.positions, inputs.out_cache_loc, inputs.known_ids, replay, logits
            )
            free_bytes.append(device.free_bytes())
        self.recorded_bytes = [before - after for before, after in pairwise(free_bytes)]
        logger.info(
            "decode_graphs=%d batch_sizes=%d..%d record_s=%.1f graphs_mib=%.0f",
            len(self._sizes),
            self._sizes[0],
            largest,
            time.perf_counter() - started_s,
            sum(self.recorded_bytes) / (1 << 20),
        )

    def _fill(self, logits: Tensor, inputs: DecodeInputs[Tensor]) -> None:
        """What is recorded."""
        logits.copy_(self._compute(inputs, len(logits)))

    def _compute(self, inputs: DecodeInputs[Tensor], size: int) -> Tensor:
        """[n, V] logits of a step. Of the host's numbers only shapes go into the recording."""
        self._slot_table.index_copy_(0, inputs.table_indices, inputs.slots)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=self._relay.input_ids(inputs.known_ids, inputs.rows),
            positions=inputs.positions,
            kv_pool=self._kv_pool,
            out_cache_loc=inputs.out_cache_loc,
            attention=self._attention.decode_step(inputs.rows, inputs.seq_lens),
            sample_indices=None,
            sample_rows=inputs.rows,
            sampled_idx_np=np.arange(size),
            cut_indices=None,
            cut_idx_np=np.empty(0, dtype=np.int64),
            sampling=SamplingBatch(size),
            prompt_spans=(),
        )
        return self._model.logits(self._model.forward(batch))


class Recorded(NamedTuple):
    """What `record_decodes` has made.

    Attributes:
        recorded_bytes: see `DecodeGraphs`; empty where nothing was recorded.
    """

    recordings: StepRecordings
    recorded_bytes: list[int]


def sizes_to_record(kernels: KernelConfig, num_rows: int, device: torch.device) -> list[int]:
    """The batch sizes that the configuration wants recorded as CUDA graphs, ascending; none on other devices."""
    if kernels.record_steps is False or device.type != "cuda":
        return []
    max_batch_size = kernels.max_recorded_bs
    return batch_sizes(min(num_rows, MAX_AUTO_GRAPH_BATCH if max_batch_size == "auto" else max_batch_size))


def record_decodes(
    sizes: Sequence[int],
    *,
    model: CausalLM,
    kv_pool: KVPool,
    attention: AttentionBackend,
    relay: TokenRelay,
    req_to_token: Tensor,
    make_device: Callable[[], GraphDevice],
) -> Recorded:
    """Record decodes of these batch sizes, if the attention can be."""
    if not sizes:
        return Recorded(NoRecordings(), [])
    if not hasattr(attention, "decode_step"):
        # A resolved configuration says "on" also where nobody asked, so this is no reason not to serve.
        logger.warning(
            "decode_graphs=0: attention by %s needs the host in each step; decodes are slower than with another "
            "--attention-backend",
            attention.name,
        )
        return Recorded(NoRecordings(), [])
    graphs = DecodeGraphs(
        model=model,
        kv_pool=kv_pool,
        attention=cast("CapturableAttention", attention),
        relay=relay,
        req_to_token=req_to_token,
        sizes=sizes,
        device=make_device(),
    )
    return Recorded(graphs, graphs.recorded_bytes)
