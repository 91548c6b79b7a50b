"""The speed of the engine on this GPU, and the limits of the GPU. Dummy weights in the shapes of real models.

    python3 benchmarks/gpu/path.py benchmarks.gpu.bench [--only Qwen3-0.6B] [--json bench.json]

Under eight minutes on one Hopper GPU without network. `make gpu-bench` is the same. With `--device cpu --tiny` it tests
itself. Scheduler, runner and pipeline are the product's, on one thread; only the HTTP side is missing. For each model:

    step      from the end of one decode step to the end of the next, median, all requests at about the same context
    busy      share of that time in which the device is busy
    host      host time of a step without waiting for the device
    prompt    of 128 and more tokens, alone: until its token is there, with recordings and without; and the host's part
    prefill   prompt tokens per second, prompts alone
    offline   256 requests with 100 to 1024 random tokens in and as many others out, all at once: output tokens per s

`attention` compares the attention backends per layer, and prints which are faster for which heads; `experts` compares
tiles, `all_reduce` the sums over several GPUs. They and the models do not fit into one run: `--only`.

The limits of the device are measured first: a device-to-device copy and a large bf16 matmul. A decode step must read
all weights and all KV of its batch, and multiply each weight with each request.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from benchmarks.gpu.attention import attention
from benchmarks.gpu.engine import Engine, Work
from benchmarks.gpu.models import SHAPES, TINY_SHAPE, write_shape
from benchmarks.gpu.ranks import all_reduce
from benchmarks.gpu.sections import Figure, LoggedMessages, Report, Section, run_sections
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.step_plan import ForwardMode

if TYPE_CHECKING:
    from engine.models.spec.model_spec import ModelSpec

BUDGET_S: Final = 470.0
DECODES: Final = (
    (1, 512),
    (8, 512),
    (64, 768),
    (256, 768),
)  # requests, context in the middle of the measurement
STEPS: Final = 64
SHORT_PROMPTS: Final = (128, 512, 2048)
OFFLINE_REQUESTS: Final = 256
OFFLINE_RANGE: Final = (100, 1024)
TARGETS: Final[dict[str, float]] = {
    "Llama-3.1-8B step, 1 request": 4.7,
    "Llama-3.1-8B step, 64 requests": 7.5,
    "Llama-3.1-8B step, 256 requests": 15.0,
    "Qwen3-0.6B step, 1 request": 0.9,
    "Qwen3-0.6B offline": 25_000,
    "Llama-3.1-8B offline": 9_500,
    "Qwen3-8B offline": 9_500,
}
MIN_PREFILL_FRACTION: Final = 0.7
MIN_BUSY: Final = 0.99
HOST_TARGETS_MS: Final = {1: 0.25, 256: 0.8}


# ---------------------------------------------------------------- limits of the device


class Ceilings(NamedTuple):
    """Limits of the device: bytes per second that a copy reads and writes, and bf16 operations per second."""

    bytes_per_s: float
    flops: float


def measure_ceilings(device: str) -> Ceilings:
    """A second on a GPU."""
    on_gpu = device == "cuda"
    source = torch.empty((2 << 30) if on_gpu else (32 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _time_of(partial(target.copy_, source), device)
    size = 8192 if on_gpu else 512
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product_s = _time_of(partial(torch.mm, a, b), device)
    num_bytes = 2 * source.nbytes
    del source, target, a, b
    if on_gpu:
        torch.cuda.empty_cache()  # the engine takes what the driver reports as free
    return Ceilings(num_bytes / copy_s, 2 * size**3 / product_s)


def _time_of(work: Callable[[], object], device: str, rounds: int = 10) -> float:
    """Seconds, mean after three unmeasured calls."""
    for _ in range(3):
        work()
    _synchronize(device)
    started_s = time.perf_counter()
    for _ in range(rounds):
        work()
    _synchronize(device)
    return (time.perf_counter() - started_s) / rounds


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ceilings(report: Report) -> None:
    """Print the limits in a section before the others."""
    if report.device == "cuda":
        report.note(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    found = measure_ceilings(report.device)
    report.figure(Figure("device-to-device copy, read and written", found.bytes_per_s / 1e12, "TB/s"))
    report.figure(Figure("bf16 matmul", found.flops / 1e12, "TFLOP/s"))


class Best:
    """Lower bounds from the ceilings and the model's size; milliseconds and tokens per second."""

    def __init__(self, spec: ModelSpec, found: Ceilings) -> None:
        self._found = found
        # A separate embedding is only a look-up.
        looked_up = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
        self._num_weights = num_parameters(spec) - looked_up
        self._head = spec.vocab_size * spec.hidden_size
        self._kv_bytes = spec.kv_bytes_per_token(2)

    def step_ms(self, batch: int, context: float) -> float:
        """A decode step."""
        reading_s = (2 * self._num_weights + batch * context * self._kv_bytes) / self._found.bytes_per_s
        return 1e3 * max(reading_s, 2 * self._num_weights * batch / self._found.flops)

    def prefill_rate(self) -> float:
        """Prompt tokens per second; the head computes only the last token of each prompt."""
        return self._found.flops / (2 * (self._num_weights - self._head))


# ---------------------------------------------------------------- measurements


def bench_model(name: str, report: Report) -> None:
    """All figures of one model."""
    shape = TINY_SHAPE if report.tiny else SHAPES[name]
    name = "tiny" if report.tiny else name  # without targets
    found = measure_ceilings(report.device)
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            {"max_total_tokens": 8192, "max_model_len": 512} if report.tiny else {"max_model_len": 4096}
        )
        started_s = time.perf_counter()
        running = max(batch for batch, _ in _decodes(report))
        folder_of_shape = write_shape(Path(folder), shape)
        with LoggedMessages() as log:
            engine = Engine(folder_of_shape, report.device, max_running_requests=running, **settings)
        report.note(f"{name}: loaded in {time.perf_counter() - started_s:.1f} s")
        recordings = (
            "decode_graphs=",
            "prompt_graphs=",
            "prompts and mixed steps",
            "a step with prompt tokens",
        )
        for line in log.starting_with("op=", "attention_backend=", "kv_pool", *recordings):
            report.note(f"  {line}")
        best = Best(engine.spec, found)
        engine.run([Work(20, 4)])  # compiles and warms
        for batch, context in _decodes(report):
            with report.part(f"{name} decode, {batch}"):
                measure_decodes(engine, name, batch, context, best, report)
        with report.part(f"{name} short prompts"):
            measure_short_prompts(engine, name, report)
        with report.part(f"{name} prefill"):
            measure_prefill(engine, name, best, report)
        with report.part(f"{name} offline"):
            measure_offline(engine, name, report)


def _decodes(report: Report) -> Sequence[tuple[int, int]]:
    return ((1, 40), (4, 40)) if report.tiny else DECODES


def measure_decodes(engine: Engine, name: str, batch: int, context: int, best: Best, report: Report) -> None:
    """Steady decodes of so many requests."""
    num_steps = 12 if report.tiny else STEPS
    # Requests with a computed prompt decode while the other prompts are computed: all overlap in the middle.
    run = engine.run([Work(context - num_steps // 2, 2 * num_steps)] * batch)
    pairs = [
        (before, step)
        for before, step in zip(run.steps, run.steps[1:], strict=False)
        if before.mode == step.mode == ForwardMode.DECODE and before.num_rows == step.num_rows == batch
    ]
    pairs = pairs[len(pairs) // 4 :][:num_steps]
    assert pairs, f"no two steps in which all {batch} requests decode"
    periods_s = [step.ended_s - before.ended_s for before, step in pairs]
    step_ms = 1e3 * statistics.median(periods_s)
    mean_context = statistics.fmean(step.mean_context for _, step in pairs)
    what = f"{name} step, {batch} request{'s' if batch > 1 else ''}"
    lowest = best.step_ms(batch, mean_context)
    report.figure(Figure(what, step_ms, "ms", lowest, TARGETS.get(what)))
    report.figure(Figure(f"{what}: output", 1e3 * batch / step_ms, "tok/s", 1e3 * batch / lowest, None, True))
    busy = sum(step.forward_s for _, step in pairs) / sum(periods_s)
    busy_target = MIN_BUSY if report.device == "cuda" else None
    report.figure(Figure(f"{what}: device busy", busy, "", None, busy_target, True))
    host_ms = 1e3 * statistics.median(run.host_s[len(run.host_s) // 2 :])
    host_target = HOST_TARGETS_MS.get(batch) if report.device == "cuda" else None
    report.figure(Figure(f"{what}: host", host_ms, "ms", None, host_target))


def measure_prefill(engine: Engine, name: str, best: Best, report: Report) -> None:
    """Prompts alone: each asks for one token."""
    length, number = (100, 4) if report.tiny else (2048, 16)
    engine.run([Work(length, 1)] * 2)
    run = engine.run([Work(length, 1)] * number)
    rate, highest = length * number / run.seconds, best.prefill_rate()
    target = None if report.tiny else round(MIN_PREFILL_FRACTION * highest, -2)
    report.figure(Figure(f"{name} prefill", rate, "tok/s", highest, target, True))


def measure_short_prompts(engine: Engine, name: str, report: Report) -> None:
    """One prompt at a time, until its token is there: with recordings, and launched kernel by kernel."""
    for length in (20,) if report.tiny else SHORT_PROMPTS:
        for how, steps in (
            ("", contextlib.nullcontext()),
            (", kernel by kernel", engine.without_recordings()),
        ):
            with steps:
                engine.run([Work(length, 1)])
                runs = [engine.run([Work(length, 1)]) for _ in range(3 if report.tiny else 15)]
            what = f"{name} prompt of {length} tokens{how}"
            report.figure(Figure(what, 1e3 * statistics.median(run.seconds for run in runs), "ms"))
            host_ms = 1e3 * statistics.median(sum(run.host_s) for run in runs)
            report.figure(Figure(f"{what}: host", host_ms, "ms"))


def offline_work(tiny: bool) -> list[Work]:
    """Random prompts, the same in every run."""
    source = random.Random(0)
    low, high = (10, 100) if tiny else OFFLINE_RANGE
    return [
        Work(source.randint(low, high), source.randint(low, high))
        for _ in range(8 if tiny else OFFLINE_REQUESTS)
    ]


def measure_offline(engine: Engine, name: str, report: Report) -> None:
    """All requests at once."""
    run = engine.run(offline_work(report.tiny))
    rate = run.num_output_tokens / run.seconds
    report.figure(Figure(f"{name} offline", rate, "tok/s", None, TARGETS.get(f"{name} offline"), True))
    busy = sum(step.forward_s for step in run.steps) / run.seconds
    report.figure(Figure(f"{name} offline: device busy", busy, "", None, None, True))


def bench_attention(report: Report) -> None:
    """Which attention is faster for which heads; see `attention.py`."""
    attention(report, measure_ceilings(report.device).bytes_per_s)


def experts(report: Report) -> None:
    """Which tile is faster for the experts of a mixture; see `experts.py`."""
    from benchmarks.gpu.experts import bench_experts  # needs Triton

    bench_experts(report, *measure_ceilings(report.device))


SECTIONS: Final = (
    Section("ceilings", ceilings, 30),
    Section("Qwen3-0.6B", partial(bench_model, "Qwen3-0.6B"), 90),
    Section("Llama-3.1-8B", partial(bench_model, "Llama-3.1-8B"), 150),
    Section("Qwen3-8B", partial(bench_model, "Qwen3-8B"), 150),
    Section("attention", bench_attention, 150),
    Section("experts", experts, 90, needs_cuda=True),
    Section("all_reduce", all_reduce, 90),
)

if __name__ == "__main__":
    run_sections("benchmarks.gpu.bench", "The speed of the engine on this GPU", SECTIONS, BUDGET_S)
