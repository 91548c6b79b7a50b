"""Sections of `bench.py` that decide which attention serves: per layer, without host time, over full GPU memory.

    attention   decodes of each backend by head shape, batch and context; skewed lengths; steps with drafts;
                prompts over an fp8 pool. It prints the lines for `model_runner/attention/selection.py`.

Each figure is microseconds of one layer; "best" is the time to read the keys and values once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.sections import Figure, Report
from engine.model_runner.attention import fa3
from engine.model_runner.attention.backend import AttentionBackend, BatchLayout, StepAttention
from engine.model_runner.attention.fa3 import FlashAttention3
from engine.model_runner.attention.torch_native import TorchNativeAttention
from engine.model_runner.attention.triton_paged import TritonAttention
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.memory.kv_pool import KVPool
from engine.models.spec.model_spec import ModelSpec

PAGE_SIZE: Final = 16
LAYERS_PER_REPLAY: Final = 20
NUM_DRAFTS: Final = 3
Lengths = list[int]


class Heads(NamedTuple):
    """Query heads, KV heads, size of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES: Final = (
    Heads(32, 8, 128),
    Heads(16, 8, 128),
    Heads(64, 8, 128),
    Heads(32, 32, 64),
    Heads(32, 32, 128),
)
DECODES: Final[dict[str, Lengths]] = {
    "1 x 512": [512],
    "1 x 32k": [32_768],
    "8 x 2k": [2048] * 8,
    "64 x 1k": [1024] * 64,
    "256 x 1k": [1024] * 256,
    "64, one of them 32k": [32_768, *[512] * 63],
}


class Bench:
    """A KV pool with requests of these lengths, and the backends over it."""

    def __init__(self, heads: Heads, lengths: Lengths, device: torch.device, kv_dtype: torch.dtype) -> None:
        self.heads, self.lengths, self.device = heads, lengths, device
        self.spec = ModelSpec(
            model_type="llama",
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            max_position_embeddings=1 << 17,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        )
        pages_of = [-(-length // PAGE_SIZE) for length in lengths]
        self.pool = KVPool(
            num_layers=1,
            num_pages=sum(pages_of),
            page_size=PAGE_SIZE,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=kv_dtype,
            device=device,
        )
        for pool in (self.pool.k[0], self.pool.v[0]):
            pool.copy_(torch.randn(pool.shape, device=device))
        pages = np.random.default_rng(0).permutation(sum(pages_of)) + 1
        table = np.zeros((len(lengths) + 1, max(pages_of) * PAGE_SIZE), dtype=np.int32)
        for row, mine in enumerate(np.split(pages, np.cumsum(pages_of)[:-1])):
            table[row, : len(mine) * PAGE_SIZE] = (mine[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(
                -1
            )
        self.table = torch.from_numpy(table).to(device)

    @property
    def read_bytes(self) -> int:
        """Keys and values of all requests."""
        sizes = self.heads.num_kv_heads * self.heads.head_dim * self.pool.k[0].dtype.itemsize
        return 2 * sum(self.lengths) * sizes

    def backend(self, kind: type[AttentionBackend]) -> AttentionBackend:
        """The backend over the pool; raises with its reasons if it cannot run."""
        dtypes = torch.bfloat16, self.pool.k[0].dtype
        if reasons := kind.reasons_against(self.spec, self.device, *dtypes):
            raise RuntimeError("; ".join(reasons))
        return kind(self.spec, self.pool, self.table, InputBuffers(self.device))

    def decode(self, kind: type[AttentionBackend], num_drafts: int = 0) -> float:
        """Seconds of a recorded decode; a request with drafts has a row for each of its tokens."""
        capturable = self.backend(kind).capturable()
        each = 1 + num_drafts
        rows = np.repeat(np.arange(len(self.lengths)), each)
        seq_lens = np.repeat(self.lengths, each) - np.tile(np.arange(num_drafts, -1, -1), len(self.lengths))
        on_device = torch.from_numpy(rows).to(self.device)
        lens = torch.from_numpy(seq_lens.astype(np.int32)).to(self.device)
        if capturable is None:
            return self.extend(kind, [each] * len(self.lengths))
        return self._time(capturable.decode_step(on_device, lens), len(rows))

    def extend(self, kind: type[AttentionBackend], new: Lengths) -> float:
        """Seconds of a step with the last so many tokens of each request."""
        extend_lens = np.array(new, dtype=np.int64)
        prefix_lens = np.array(self.lengths, dtype=np.int64) - extend_lens
        layout = BatchLayout(np.arange(len(new)), prefix_lens, extend_lens, len(new) if max(new) > 1 else 0)
        return self._time(self.backend(kind).plan_step(layout), sum(new))

    def _time(self, step: StepAttention, num_tokens: int) -> float:
        shape = num_tokens, self.heads.num_heads, self.heads.head_dim
        q = torch.randn(shape, device=self.device).bfloat16()
        return time_of(partial(step.forward, 0, q), self.device)


def time_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the median of several replays of a graph with many; on the CPU of one call after another."""
    if device.type != "cuda":
        work()
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(LAYERS_PER_REPLAY):
            work()
    times: list[float] = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / LAYERS_PER_REPLAY)
    return sorted(times)[len(times) // 2]


@contextmanager
def one_split() -> Iterator[None]:
    """Recordings in which FA3 does not split the keys: no kernel that combines, and skewed lengths are slow."""
    with mock.patch.object(fa3, "_ANY_SPLITS", 1):
        yield


def attention(report: Report, bytes_per_s: float) -> None:
    """See the module."""
    device = torch.device(report.device)
    kinds: tuple[type[AttentionBackend], ...] = (FlashAttention3, TritonAttention)
    shapes: Sequence[Heads] = SHAPES
    decodes = DECODES
    if report.tiny:
        kinds, shapes, decodes = (
            (TorchNativeAttention,),
            (Heads(4, 2, 16), Heads(2, 2, 16)),
            {"2 x 40": [40, 40]},
        )
    lines = []
    for heads in shapes:
        shape = f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}"
        totals: dict[str, float] = {}
        for what, lengths in decodes.items():
            with report.part(f"decode {shape}, {what}"):
                bench = Bench(heads, lengths, device, torch.bfloat16)
                best_us = 1e6 * bench.read_bytes / bytes_per_s

                def tell(
                    how: str, seconds: float, best: float = best_us, of: str = f"decode {shape}, {what}"
                ) -> None:
                    report.figure(Figure(f"{of}: {how}", 1e6 * seconds, "us", best))

                for kind in kinds:
                    seconds = bench.decode(kind)
                    totals[kind.name] = totals.get(kind.name, 0.0) + seconds
                    tell(kind.name, seconds)
                    tell(f"{kind.name}, {NUM_DRAFTS} drafts as rows", bench.decode(kind, NUM_DRAFTS))
                if FlashAttention3 in kinds:
                    with one_split():
                        tell("fa3, one split", bench.decode(FlashAttention3))
                    tokens = [1 + NUM_DRAFTS] * len(lengths)
                    tell(f"fa3, {NUM_DRAFTS} drafts as queries", bench.extend(FlashAttention3, tokens))
        if totals:
            fastest = min(totals, key=lambda name: totals[name])
            capability = torch.cuda.get_device_capability() if device.type == "cuda" else (0, 0)
            lines.append(
                f"    ({capability}, {heads.num_heads // heads.num_kv_heads}): {fastest!r},  # {shape}"
            )
    report.note("measured_choice.MEASURED, from the sums over all decodes:")
    for line in lines:
        report.note(line)
    fp8_prompts(report, device, kinds)


def fp8_prompts(report: Report, device: torch.device, kinds: Sequence[type[AttentionBackend]]) -> None:
    """Whole prompts over an fp8 pool: FA3, which rounds queries too, against the Triton kernel."""
    heads, lengths = (Heads(4, 2, 16), [40, 40]) if report.tiny else (Heads(32, 8, 128), [2048] * 4)
    kv_dtype = torch.bfloat16 if report.tiny else torch.float8_e4m3fn
    for kind in kinds:
        with report.part(f"prompts over an fp8 pool: {kind.name}"):
            seconds = Bench(heads, lengths, device, kv_dtype).extend(kind, lengths)
            products = sum(length * (length + 1) // 2 for length in lengths)
            flops: Any = 4 * heads.num_heads * heads.head_dim * products
            report.figure(Figure(f"prompts over an fp8 pool: {kind.name}", flops / seconds / 1e12, "TFLOP/s"))
