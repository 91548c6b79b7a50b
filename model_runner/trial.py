"""`measure`: memory profiling: measures the device memory that serving takes besides weights and KV pool.

It runs the largest steps on a KV pool that is just large enough for them: prompts of which one is long, and as many
tokens in short extends, one of them after a long context, for which attention may need more. The last
steps, of single tokens and of the shortest extends, compile the kernels that only such steps use, which no request has
to wait for then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from msgspec.structs import replace

from ..launch.resolve.measured_pool import Measured, graphs_estimate
from ..runtime.feasibility import pages_for
from ..runtime.pooling import PoolingParams
from ..runtime.sampling_params import SamplingParams
from ..runtime.step_plan import ForwardMode, NewReq, StepPlan
from .memory.device_memory import explained
from .recording.graphs.graph_sizes import GraphSizes

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

_FEW: Final = 8  # requests of the last steps
_LITTLE_MS: Final = 1.0  # of the host for a launch, which is nothing beside a step with prompts

_POOLING: Final = PoolingParams(all_tokens=True)

MakeRunner = Callable[["Capacity", GraphSizes], "ModelRunner"]
"""Makes a runner with the loaded weights for a capacity; it records steps of these sizes."""


def measure(
    make_runner: MakeRunner,
    capacity: Capacity,
    *,
    step_tokens: int,
    graph_sizes: GraphSizes,
    memory: DeviceMemory,
    samples: bool = True,
) -> Measured:
    """Run page copies and the largest steps, then the largest recordings.

    Args:
        capacity: the planned capacity; only a smaller KV pool is allocated.
        step_tokens: new tokens of the largest step that the scheduler can make.
        graph_sizes: the steps that will be recorded.
        samples: False for an encoder, whose texts are followed by nothing.

    Raises:
        ConfigError: the largest step does not fit into memory.
    """
    lengths = prompt_lengths(step_tokens, capacity)
    extends = short_extends(step_tokens, capacity)
    few = min(_FEW, len(extends))
    num_pages = max(
        sum(pages_for(length, capacity.page_size) for length in each) for each in (lengths, extends)
    )
    small = replace(capacity, num_pages=num_pages, num_host_pages=min(1, capacity.num_host_pages))

    what = f"the largest step besides the weights, {sum(lengths)} tokens of {len(lengths)} requests"
    way_out = "lower --chunked-prefill-size or --max-running-requests"
    with explained(what, memory, way_out):
        peak_bytes = memory.watch_peak()
        runner = make_runner(small, GraphSizes())
        gathered_token_bytes = runner.sizes.gathered_token_bytes
        # What attention gathers of a long context is in the sums of the pool already.
        prefix_len = capacity.max_model_len - 1 - extends[0] if samples and not gathered_token_bytes else 0
        steps = [
            largest_step(lengths, small, samples=samples),
            largest_step(extends, small, samples=samples, prefix_len=max(0, prefix_len), after=len(lengths)),
            largest_step([1] * few, small, samples=samples, after=len(extends)),
            largest_step([min(2, extends[0])] * few, small, samples=samples, after=few),
        ]
        for step_id, plan in enumerate((moves(small), *steps), 1):
            result = runner.launch(replace(plan, step_id=step_id)).wait()
            if result.out_of_memory:
                raise torch.OutOfMemoryError(result.out_of_memory)
        again = replace(steps[-1], step_id=step_id + 1, finished_rows=steps[-1].rows)
        launch_ms = _launch_ms(runner, again)
    step_bytes = max(0, peak_bytes() - runner.kv_pool.num_bytes)
    del runner

    graph_bytes = 0
    if graph_sizes.text:
        with explained(graph_sizes.text, memory, "lower --max-recorded-bs, or use --no-record-steps"):
            runner = make_runner(small, graph_sizes.largest)
            if graph_sizes.prompts:
                _tell_recorded_launch(runner, again, graph_sizes.prompts[-1], launch_ms)
        recorded_bytes = runner.sizes.recorded_bytes
        graph_bytes = graphs_estimate(recorded_bytes.prompts, len(graph_sizes.prompts))
        for of_sizes in (recorded_bytes.decodes, recorded_bytes.samplers):
            graph_bytes += graphs_estimate(of_sizes, len(graph_sizes.decodes))
        del runner
    if not graph_sizes.prompts and launch_ms > _LITTLE_MS:
        logger.warning(
            "a step with prompt tokens is launched kernel by kernel, which takes the host %.1f ms: smaller steps wait "
            "for it (launch_ms=%.1f)",
            launch_ms,
            launch_ms,
        )
    measured = Measured(
        free_bytes=memory.free_bytes(),
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        gathered_token_bytes=gathered_token_bytes,
    )
    logger.info("measured memory: %s; tokens=%d requests=%d", measured.sums, step_tokens, len(lengths))
    return measured


def _launch_ms(runner: ModelRunner, plan: StepPlan) -> float:
    """Host time of a step; its kernels are compiled."""
    started_s = time.perf_counter()
    pending = runner.launch(plan)
    launch_ms = 1e3 * (time.perf_counter() - started_s)
    pending.wait()
    return launch_ms


def _tell_recorded_launch(runner: ModelRunner, plan: StepPlan, most_tokens: int, eager_ms: float) -> None:
    """Log what recordings save."""
    runner.launch(replace(plan, step_id=1, finished_rows=b"")).wait()  # the first step also allocates
    recorded_ms = _launch_ms(runner, replace(plan, step_id=2))
    logger.info(
        "prompts and mixed steps of up to %d tokens: launch_ms=%.1f; larger ones are launched kernel by kernel: "
        "launch_ms=%.1f",
        most_tokens,
        recorded_ms,
        eager_ms,
    )


def prompt_lengths(step_tokens: int, capacity: Capacity) -> list[int]:
    """Lengths of prompts that fill a step: as many as may run, most of them short, so that some are long."""
    num_reqs = min(capacity.max_running_requests, step_tokens)
    left, lengths = step_tokens, []
    for others in range(num_reqs - 1, -1, -1):
        lengths.append(max(1, min(left - others, capacity.max_model_len - 1)))
        left -= lengths[-1]
    return lengths


def short_extends(step_tokens: int, capacity: Capacity) -> list[int]:
    """Lengths of extends that fill a step: of as many requests as may run, all of about the same length."""
    num_reqs = min(capacity.max_running_requests, step_tokens)
    share, longer = divmod(step_tokens, num_reqs)
    lengths = [share + 1] * longer + [share] * (num_reqs - longer)
    return [min(length, capacity.max_model_len - 1) for length in lengths]


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


def largest_step(
    lengths: Sequence[int], capacity: Capacity, *, samples: bool = True, prefix_len: int = 0, after: int = 0
) -> StepPlan:
    """A step that computes these whole prompts and samples for each; it uses pages in order from page 1 on.

    Args:
        lengths: of the tokens that are computed, one per request.
        samples: False: the result of each is a vector of all its tokens instead.
        prefix_len: tokens of the first prompt that are in the KV pool; all in the dummy page, whose values are read.
        after: requests of the step before, which have ended.
    """
    size = capacity.page_size
    first_pages = 1 + np.cumsum([0, *(pages_for(length, size) for length in lengths)])
    slots = [
        np.arange(page * size, page * size + length)
        for page, length in zip(first_pages.tolist(), lengths, strict=False)
    ]
    rows = np.arange(len(lengths), dtype=np.int32)
    computed = np.zeros(len(lengths), dtype=np.int32)
    computed[0] = prefix_len
    prompt_lens = [int(before) + length for before, length in zip(computed, lengths, strict=True)]
    return StepPlan(
        step_id=2,
        mode=ForwardMode.EXTEND,
        rows=rows.tobytes(),
        num_computed_tokens=computed.tobytes(),
        num_scheduled_tokens=np.array(lengths, dtype=np.int32).tobytes(),
        out_cache_loc=np.concatenate(slots).astype(np.int32).tobytes(),
        samples=bytes([samples]) * len(lengths),
        pools=b"" if samples else bytes([1]) * len(lengths),
        total_num_scheduled_tokens=sum(lengths),
        finished_rows=np.arange(after, dtype=np.int32).tobytes(),
        new_reqs=tuple(
            NewReq(
                f"trial{row}",
                row,
                np.zeros(prompt_len, dtype=np.int32).tobytes(),
                prompt_len,
                np.zeros(computed[row], dtype=np.int32).tobytes(),
                _EVERYTHING if samples else SamplingParams(seed=0),
                None if samples else _POOLING,
            )
            for row, prompt_len in enumerate(prompt_lens)
        ),
    )
