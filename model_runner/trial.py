"""`measure`: memory profiling: measures the device memory that serving takes besides weights and KV pool.

It runs the largest step on a KV pool that is just large enough for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from msgspec.structs import replace

from ..runtime.feasibility import pages_for
from ..runtime.pooling import PoolingParams
from ..runtime.resolve.measured_pool import Measured, graphs_estimate
from ..runtime.sampling_params import SamplingParams
from ..runtime.step_plan import ForwardMode, NewReq, StepPlan
from .memory.device_memory import explained

if TYPE_CHECKING:
    from ..runtime.feasibility import Capacity
    from .memory.device_memory import DeviceMemory
    from .model_runner import ModelRunner

logger = logging.getLogger(__name__)

_EVERYTHING: Final = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logprobs=20,
    prompt_logprobs=20,
    max_new_tokens=1,
    seed=0,
)
"""All features of the sampler at once, so that no later request takes more memory."""

_POOLING: Final = PoolingParams(all_tokens=True)

MakeRunner = Callable[["Capacity", Sequence[int]], "ModelRunner"]
"""Makes a runner with the loaded weights for a capacity; it records decodes of these batch sizes."""


def measure(
    make_runner: MakeRunner,
    capacity: Capacity,
    *,
    step_tokens: int,
    batch_sizes: Sequence[int],
    memory: DeviceMemory,
    samples: bool = True,
) -> Measured:
    """Run page copies and the largest step, then the largest recordings.

    Args:
        capacity: the planned capacity; only a smaller KV pool is allocated.
        step_tokens: new tokens of the largest step that the scheduler can make.
        batch_sizes: the batch sizes of decodes that will be recorded, ascending.
        samples: False for an encoder, whose texts are followed by nothing.

    Raises:
        ConfigError: the largest step does not fit into memory.
    """
    lengths = prompt_lengths(step_tokens, capacity)
    num_pages = sum(pages_for(length, capacity.page_size) for length in lengths)
    small = replace(capacity, num_pages=num_pages, num_host_pages=min(1, capacity.num_host_pages))

    what = f"the largest step besides the weights, {sum(lengths)} tokens of {len(lengths)} requests"
    way_out = "lower --chunked-prefill-size or --max-running-requests"
    with explained(what, memory, way_out):
        peak_bytes = memory.watch_peak()
        runner = make_runner(small, ())
        for plan in (moves(small), largest_step(lengths, small, samples=samples)):
            result = runner.launch(plan).wait()
            if result.out_of_memory:
                raise torch.OutOfMemoryError(result.out_of_memory)
    step_bytes = max(0, peak_bytes() - runner.kv_pool.num_bytes)
    gathered_token_bytes = runner.sizes.gathered_token_bytes
    del runner

    graph_bytes = 0
    if batch_sizes:
        what = f"recorded decodes of {batch_sizes[-1]} requests"
        with explained(what, memory, "lower --max-recorded-bs, or use --no-record-steps"):
            recorded_bytes = make_runner(small, batch_sizes[-2:]).sizes.recorded_bytes
        graph_bytes = graphs_estimate(recorded_bytes, len(batch_sizes))
    measured = Measured(
        free_bytes=memory.free_bytes(),
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        gathered_token_bytes=gathered_token_bytes,
    )
    logger.info("measured memory: %s; tokens=%d requests=%d", measured.sums, step_tokens, len(lengths))
    return measured


def prompt_lengths(step_tokens: int, capacity: Capacity) -> list[int]:
    """Lengths of prompts that fill a step: as many as may run, most of them short, so that some are long."""
    num_reqs = min(capacity.max_running_requests, step_tokens)
    left, lengths = step_tokens, []
    for others in range(num_reqs - 1, -1, -1):
        lengths.append(max(1, min(left - others, capacity.max_model_len - 1)))
        left -= lengths[-1]
    return lengths


def moves(capacity: Capacity) -> StepPlan:
    """A step without tokens that swaps a page out and in and copies a page, if the pools have enough pages."""
    page_copies, swap_outs, swap_ins = ([1, 2] if capacity.num_pages > 1 else []), [], []
    if capacity.num_host_pages:
        swap_outs, swap_ins = [1, 0], [0, 1]
    return StepPlan(
        step_id=1,
        mode=ForwardMode.IDLE,
        rows=b"",
        num_computed_tokens=b"",
        num_scheduled_tokens=b"",
        out_cache_loc=b"",
        samples=b"",
        total_num_scheduled_tokens=0,
        page_copies=_int32(page_copies),
        swap_outs=_int32(swap_outs),
        swap_ins=_int32(swap_ins),
    )


def _int32(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


def largest_step(lengths: Sequence[int], capacity: Capacity, *, samples: bool = True) -> StepPlan:
    """A step that computes these whole prompts and samples for each; it uses pages in order from page 1 on.

    `samples`: False: the result of each is a vector of all its tokens instead.
    """
    size = capacity.page_size
    first_pages = 1 + np.cumsum([0, *(pages_for(length, size) for length in lengths)])
    slots = [
        np.arange(page * size, page * size + length)
        for page, length in zip(first_pages.tolist(), lengths, strict=False)
    ]
    rows = np.arange(len(lengths), dtype=np.int32)
    return StepPlan(
        step_id=2,
        mode=ForwardMode.EXTEND,
        rows=rows.tobytes(),
        num_computed_tokens=np.zeros(len(lengths), dtype=np.int32).tobytes(),
        num_scheduled_tokens=np.array(lengths, dtype=np.int32).tobytes(),
        out_cache_loc=np.concatenate(slots).astype(np.int32).tobytes(),
        samples=bytes([samples]) * len(lengths),
        pools=b"" if samples else bytes([1]) * len(lengths),
        total_num_scheduled_tokens=sum(lengths),
        new_reqs=tuple(
            NewReq(
                f"trial{row}",
                row,
                np.zeros(length, dtype=np.int32).tobytes(),
                length,
                b"",
                _EVERYTHING if samples else SamplingParams(seed=0),
                None if samples else _POOLING,
            )
            for row, length in enumerate(lengths)
        ),
    )
