"""Decode steps whose products fetch what attention reads, and those that do not, in turn, in one process.

    python benchmarks/early_fetch.py [--requests 16 32 64 128] [--tokens 375] [--kv int8] [--mib 12] [--threads 2]

The products and the attention of a model like SmolLM2-135M as one program, as decode steps are run; all layers'
weights, keys and values are read in each. Results have to be the same bits. What is gained depends on what the
machine's other tenants leave of the cache that the cores share, so: several runs, and the ratio within a round.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Run as a script: its siblings are found from the repository's root. Last, so that nothing there hides a package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.compressed_weights import LAYER_SHAPES, ComparisonError, report
from benchmarks.kernel_builds import at_least
from benchmarks.smollm2 import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, PAGE_SIZE, make_kv_pool
from engine.runtime.openmp import shorten_spinning

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from torch import Tensor

    from engine.model_runner.attention.early_fetch import EarlyFetch
    from engine.model_runner.kernels.compressed_linear import CompressedLinear
    from engine.model_runner.memory.kv_pool import KVPool

RUN_PAGES = 8  # of a request lie side by side


class Sizes(NamedTuple):
    """Of what is measured; `kv_dtype`: as torch names it."""

    requests: int
    tokens: int
    layers: int
    kv_dtype: str


def main() -> None:
    """Print a line for each number of requests."""
    parser = argparse.ArgumentParser(description="decode steps with and without early fetching, in turn")
    parser.add_argument("--requests", nargs="+", type=at_least(1), default=[16, 32, 64, 128])
    parser.add_argument("--tokens", type=at_least(1), default=375, help="of each request")
    parser.add_argument("--kv", choices=("bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--mib", type=at_least(1), default=12, help="fetched early of a layer, at most")
    parser.add_argument("--layers", type=at_least(1), default=LAYERS)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=30)
    args = parser.parse_args()
    shorten_spinning()  # before torch is imported
    import torch

    from engine.model_runner.kernels.cpu.compiler import NoLibraryError
    from engine.model_runner.kernels.cpu.library import load_library

    torch.set_num_threads(args.threads)
    try:
        library = load_library()
        print(f"{'tokens':>6} {'without, ms':>11} {'with, ms':>11} {'ratio':>6}  quartiles")
        for requests in args.requests:
            sizes = Sizes(requests, args.tokens, args.layers, args.kv)
            print(report(requests, measure(library, sizes, args.mib << 20, args.rounds)), flush=True)
    except (NoLibraryError, ComparisonError) as error:
        sys.exit(str(error))


def measure(library: ctypes.CDLL, sizes: Sizes, early_bytes: int, rounds: int) -> npt.NDArray[np.float64]:
    """Seconds of a step, [rounds, 2]: without and with early fetching.

    Raises:
        ComparisonError: a step cannot be recorded, or the results are not the same bits.
    """
    import torch

    from engine.model_runner.attention.early_fetch import EarlyFetch

    sides = [EarlyFetch(0), EarlyFetch(early_bytes)]
    sides[1].allow(True)
    with torch.inference_mode():
        num_pages = sizes.requests * _runs(sizes) * RUN_PAGES
        pool = make_kv_pool(sizes.layers, num_pages, getattr(torch, sizes.kv_dtype))
        weights = make_weights(library, sizes.layers)
        steps = [_step(library, sizes, pool, weights, early) for early in sides]
        seconds = np.zeros((rounds + 1, 2))
        rng = np.random.default_rng(0)
        for row in seconds:
            for side in rng.permutation(2):
                start = time.perf_counter()
                steps[side].run()
                row[side] = time.perf_counter() - start
        if not torch.equal(steps[0].result, steps[1].result):
            raise ComparisonError("the two steps do not give the same bits")
    return seconds[1:]  # the first round warms up


class Step(NamedTuple):
    """A recorded step: `run` computes `result`; `owners` keep what it works with."""

    run: Callable[[], None]
    result: Tensor
    owners: tuple[object, ...]


def _step(
    library: ctypes.CDLL, sizes: Sizes, pool: KVPool, weights: list[CompressedLinear], early: EarlyFetch
) -> Step:
    import torch

    from engine.model_runner.attention.cpu_native import CpuNativeAttention
    from engine.model_runner.recording.arena import Arena
    from engine.model_runner.recording.native_program import record

    spec: Any = SimpleNamespace(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_layers=sizes.layers,
        window_of=lambda _layer_id: None,
    )
    buffers: Any = None  # which this backend does not use
    attention = CpuNativeAttention(spec, pool, make_table(sizes), buffers, library, early_fetch=early)
    rows, ones = torch.arange(sizes.requests), torch.ones(sizes.requests, dtype=torch.int64)
    prefix_lens = ones * (sizes.tokens - 1)
    x = torch.randn(sizes.requests, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    arena, per_layer = Arena(), len(LAYER_SHAPES)

    def compute() -> Tensor:
        step, hidden = attention.repeatable_step(rows, prefix_lens, ones), x
        for layer_id in range(sizes.layers):
            qkv, *others = weights[layer_id * per_layer : (layer_id + 1) * per_layer]
            queries = qkv(hidden)[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
            hidden = step.forward(layer_id, queries)
            for weight in others:
                hidden = weight(hidden)
        return hidden

    recorded = record(library, arena, compute)
    if recorded.program is None:
        raise ComparisonError(f"the step cannot be recorded: {recorded.reason_against}")
    return Step(recorded.program.run, recorded.result, (arena, attention, rows, ones, prefix_lens, x))


def make_weights(library: ctypes.CDLL, num_layers: int) -> list[CompressedLinear]:
    """Of the layers, of random numbers.

    Raises:
        ComparisonError: this level of instructions compresses none, and its products fetch nothing early.
    """
    import torch

    from engine.model_runner.kernels.native_linear import NativeLinear

    generator = torch.Generator().manual_seed(0)
    weights = []
    for outputs, inputs in LAYER_SHAPES * num_layers:
        numbers = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        weight = NativeLinear(library, numbers.to(torch.bfloat16)).compressed()
        if weight is None:
            raise ComparisonError("products of this level of instructions fetch nothing early")
        if outputs == 2 * INNER:
            weight.end_with_silu()
        weights.append(weight)
    return weights


def make_table(sizes: Sizes) -> Tensor:
    """[requests, slots] int32: pages in runs, which lie in random order."""
    import torch

    runs, run_slots = _runs(sizes), RUN_PAGES * PAGE_SIZE
    order = np.random.default_rng(0).permutation(sizes.requests * runs).reshape(sizes.requests, runs, 1)
    slots = PAGE_SIZE + order * run_slots + np.arange(run_slots)  # page 0 is nobody's
    return torch.from_numpy(slots.reshape(sizes.requests, -1).astype(np.int32))


def _runs(sizes: Sizes) -> int:
    """Of each request."""
    return -(-sizes.tokens // (RUN_PAGES * PAGE_SIZE))


if __name__ == "__main__":
    main()
