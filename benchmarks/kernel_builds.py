"""Attention of decodes by several builds of the CPU kernels, in turn, in one process: what a change gains.

    python benchmarks/kernel_builds.py keep before        # with the sources as they were
    python benchmarks/kernel_builds.py keep after         # and as they are now
    python benchmarks/kernel_builds.py compare before after [--kv-dtype int8] [--requests 64] [--length 360] [--cold]

On a shared machine the same kernel takes half as long again a minute later, and processes that run one after the other
differ by more than most changes gain. Here each round runs all builds, in an order drawn by chance, and what counts is
the ratio within a round: it is good to a percent or two. Shapes of a layer are those of SmolLM2-135M, pages lie in runs
of eight, and there are so many layers that no cache holds their keys and values.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Run as a script: its siblings are found from the repository's root. Last, so that nothing there hides a package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_kernels import HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, model_spec
from engine.model_runner.attention.backend import BatchLayout, StepAttention
from engine.model_runner.attention.cpu_native import CpuNativeAttention
from engine.model_runner.input_buffers import InputBuffers
from engine.model_runner.kernels.cpu.build import build
from engine.model_runner.kernels.cpu.compiler import NoLibraryError
from engine.model_runner.kernels.cpu.isa import best_isa
from engine.model_runner.kernels.cpu.library import open_library
from engine.model_runner.kv_pool import KVPool
from engine.runtime.openmp import shorten_spinning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

RUN_PAGES = 8
COLD_BYTES = 48 << 20  # more than a core's share of any cache
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


class Decodes(NamedTuple):
    """Requests that decode a token each.

    Attributes:
        lengths: [N] int64, tokens of each, half to one and a half times the mean.
        table: [N, most tokens] int32, slots.
    """

    lengths: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    num_pages: int


class Build(NamedTuple):
    """What a build's kernels are called through; its backend holds the memory that the step reads."""

    backend: CpuNativeAttention
    step: StepAttention


def main() -> None:
    """Keep a build, or compare some."""
    parser = argparse.ArgumentParser(description="builds of the CPU kernels, in turn")
    parser.add_argument("--folder", type=Path, default=Path("build/kernels"), help="where builds are kept")
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("keep", help="compile the sources as they are, and keep that under a name")
    keep.add_argument("name")
    compare = commands.add_parser("compare", help="the first of the builds beside the others")
    compare.add_argument("names", nargs="+")
    compare.add_argument("--kv-dtype", choices=list(DTYPES), default="bfloat16")
    compare.add_argument("--requests", type=int, default=64)
    compare.add_argument("--length", type=int, default=360, help="mean tokens of a request")
    compare.add_argument("--layers", type=int, default=30)
    compare.add_argument("--threads", type=int, default=2)
    compare.add_argument("--rounds", type=int, default=40)
    compare.add_argument("--cold", action="store_true", help="empty the caches before each call")
    args = parser.parse_args()
    try:
        if args.command == "keep":
            args.folder.mkdir(parents=True, exist_ok=True)
            print(shutil.copy(build(best_isa()), args.folder / f"{args.name}.so"))
            return
        shorten_spinning()
        torch.set_num_threads(args.threads)
        decodes = make_decodes(args.requests, args.length)
        files = [args.folder / f"{name}.so" for name in args.names]
        builds = open_builds(files, decodes, args.layers, DTYPES[args.kv_dtype])
        q = torch.randn(args.requests, HEADS, HEAD_DIM).to(torch.bfloat16)
        seconds = measure(builds, q, args.layers, args.rounds, is_cold=args.cold)
    except NoLibraryError as error:
        sys.exit(f"{error}\nmake a build with: python benchmarks/kernel_builds.py keep NAME")
    for line in report(args.names, seconds, int(decodes.lengths.sum()) * args.layers):
        print(line)


def make_decodes(num_requests: int, mean_length: int) -> Decodes:
    """Their pages in runs, which lie in random order."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(mean_length // 2, mean_length * 3 // 2 + 1, num_requests)
    num_runs = -(-lengths // (RUN_PAGES * PAGE_SIZE))
    starts = 1 + rng.permutation(num_runs.sum()) * RUN_PAGES  # page 0 is nobody's
    table = np.zeros((num_requests, num_runs.max() * RUN_PAGES * PAGE_SIZE), dtype=np.int32)
    for row, mine in zip(table, np.split(starts, np.cumsum(num_runs)[:-1]), strict=True):
        slots = mine[:, None] * PAGE_SIZE + np.arange(RUN_PAGES * PAGE_SIZE)
        row[: slots.size] = slots.reshape(-1)
    return Decodes(lengths, table, int(num_runs.sum()) * RUN_PAGES)


def open_builds(files: Sequence[Path], decodes: Decodes, num_layers: int, dtype: torch.dtype) -> list[Build]:
    """All with the same keys and values.

    Raises:
        NoLibraryError: a file is missing, or not for this CPU.
    """
    device = torch.device("cpu")
    pool = KVPool(
        num_layers=num_layers,
        num_pages=decodes.num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=device,
    )
    for numbers in (*pool.k, *pool.v):
        numbers.normal_() if dtype.is_floating_point else numbers.random_(-127, 128)
    for scales in (*pool.k_scale, *pool.v_scale):
        scales.fill_(1 / 127)
    ones = np.ones_like(decodes.lengths)
    layout = BatchLayout(np.arange(len(ones)), decodes.lengths - 1, ones, 0)
    spec, table = model_spec(num_layers), torch.from_numpy(decodes.table)
    backends = [
        CpuNativeAttention(spec, pool, table, InputBuffers(device), open_library(file)) for file in files
    ]
    return [Build(backend, backend.plan_step(layout)) for backend in backends]


def measure(
    builds: Sequence[Build], q: Tensor, num_layers: int, rounds: int, *, is_cold: bool
) -> npt.NDArray[np.float64]:
    """Seconds of all layers, [rounds, builds].

    Args:
        q: [N, HEADS, HEAD_DIM] bfloat16.
    """
    other: Tensor | None = torch.ones(COLD_BYTES // 4) if is_cold else None
    rng = np.random.default_rng(0)
    seconds = np.zeros((rounds + 1, len(builds)))
    for row in seconds:
        for n in rng.permutation(len(builds)):
            for layer_id in range(num_layers):
                if other is not None:
                    other.sum()
                start = time.perf_counter()
                builds[n].step.forward(layer_id, q)
                row[n] += time.perf_counter() - start
    return seconds[1:]  # the first round warms up


def report(names: Sequence[str], seconds: npt.NDArray[np.float64], num_keys: int) -> list[str]:
    """A line of each build; its ratio to the first is the median of the rounds' ratios, quartiles behind it."""
    width = max(map(len, names))
    lines = [f"{'build':{width}} {'ns a key':>9} {'ratio':>6}  quartiles"]
    for name, mine in zip(names, seconds.T, strict=True):
        low, middle, high = np.quantile(mine / seconds[:, 0], [0.25, 0.5, 0.75])
        per_key = np.median(mine) * 1e9 / num_keys
        lines.append(f"{name:{width}} {per_key:9.2f} {middle:6.3f}  {low:.3f} to {high:.3f}")
    return lines


if __name__ == "__main__":
    main()
