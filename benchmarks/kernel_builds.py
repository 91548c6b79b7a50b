"""Decode attention by several builds of the CPU kernels, in turn, in one process: the gain of a change.

    python benchmarks/kernel_builds.py keep before    # then change the kernels
    python benchmarks/kernel_builds.py keep after
    python benchmarks/kernel_builds.py compare before after [--kv-dtype int8] [--requests 64] [--length 360] [--cold]

On a shared machine the time of a kernel varies by 50 % within minutes, and processes that run one after the other
differ by more than most changes gain. Here each round runs all builds, in random order, and the figure is the ratio
within a round: on an otherwise idle machine quartiles are 1 to 5 % apart. Results are compared first. Shapes
of a layer are those of SmolLM2-135M, pages form contiguous runs of eight, and by default the keys and values
of all layers exceed any cache.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import engine
from benchmarks.smollm2 import HEAD_DIM, HEADS, PAGE_SIZE, make_kv_pool, model_spec
from engine.launch.child.openmp import shorten_spinning

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from engine.model_runner.attention.backend import StepAttention
    from engine.model_runner.attention.cpu_native import CpuNativeAttention

ROOT = Path(__file__).resolve().parent.parent
RUN_PAGES = 8
COLD_BYTES = 48 << 20  # more than a core's share of any cache
MOST_DIFFERENCE = 0.05  # root mean square, of the first build's results
KV_DTYPES = ("bfloat16", "int8")


class BuildError(Exception):
    """A build that cannot be kept or compared; the message has the fix."""


class Decodes(NamedTuple):
    """Requests that each decode one token.

    Attributes:
        lengths: [N] int64, tokens of each, half to one and a half times the mean.
        table: [N, most tokens] int32, slots.
    """

    lengths: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    num_pages: int


class Build(NamedTuple):
    """The attention step that calls a build's kernels; its backend owns the memory that the step reads."""

    backend: CpuNativeAttention
    step: StepAttention


def main() -> None:
    """Keep a build, or compare kept builds."""
    parser = argparse.ArgumentParser(description="builds of the CPU kernels, in turn")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/kernels", help="where builds are kept")
    commands = parser.add_subparsers(dest="command", required=True)
    keep_parser = commands.add_parser(
        "keep", help="compile the current sources, and keep the build under a name"
    )
    keep_parser.add_argument("name", type=build_name)
    compare_parser = commands.add_parser("compare", help="compare the first build with the others")
    compare_parser.add_argument("names", nargs="+", type=build_name)
    compare_parser.add_argument("--kv-dtype", choices=KV_DTYPES, default=KV_DTYPES[0])
    compare_parser.add_argument("--requests", type=at_least(1), default=64)
    compare_parser.add_argument("--length", type=at_least(2), default=360, help="mean tokens of a request")
    compare_parser.add_argument("--layers", type=at_least(1), default=30)
    compare_parser.add_argument("--threads", type=at_least(1), default=2)
    compare_parser.add_argument("--rounds", type=at_least(1), default=40)
    compare_parser.add_argument(
        "--cold", action="store_true", help="read 48 MB of something else before each call"
    )
    args = parser.parse_args()
    try:
        if args.command == "keep":
            print(keep(args.folder, args.name))
        else:
            compare(args)
    except (BuildError, OSError) as error:
        sys.exit(str(error))


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type for whole numbers with a minimum."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse


def build_name(text: str) -> str:
    """An argparse type for the name of a build, which is also a file name."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of letters, digits, '_', '-' and '.'")
    return text


def keep(folder: Path, name: str) -> Path:
    """Compile this repository's sources for this CPU; returns the file.

    Raises:
        BuildError: Python's `engine` is another folder, or there is no compiler.
    """
    from engine.model_runner.kernels.cpu.build import build
    from engine.model_runner.kernels.cpu.compiler import NoLibraryError
    from engine.model_runner.kernels.cpu.isa import best_isa

    used = Path(engine.__file__).resolve().parent
    if used != ROOT:
        raise BuildError(f"`engine` is the one in {used}, not in {ROOT}: run `pip install -e {ROOT}` first")
    try:
        built = build(best_isa())
    except NoLibraryError as error:
        raise BuildError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.interface").write_text(interface())
    return Path(shutil.copy(built, folder / f"{name}.so"))


def interface() -> str:
    """A hash of the signatures of the library's functions."""
    from engine.model_runner.kernels.cpu.library import _SIGNATURES

    return hashlib.sha256(repr(sorted(_SIGNATURES.items())).encode()).hexdigest()


def compare(args: argparse.Namespace) -> None:
    """Print a line for each build.

    Raises:
        BuildError: one cannot be loaded, or its results differ.
    """
    shorten_spinning()  # before torch is imported
    import torch

    torch.set_num_threads(args.threads)
    libraries = [open_build(args.folder, name) for name in args.names]
    decodes = make_decodes(args.requests, args.length)
    builds = make_builds(libraries, decodes, args.layers, getattr(torch, args.kv_dtype))
    q = torch.randn(args.requests, HEADS, HEAD_DIM).to(torch.bfloat16)
    differences = compare_results(args.names, [build.step.forward(0, q) for build in builds])
    seconds = measure(builds, q, args.layers, args.rounds, is_cold=args.cold)
    for line in report(args.names, differences, seconds, int(decodes.lengths.sum()) * args.layers):
        print(line)


def open_build(folder: Path, name: str) -> ctypes.CDLL:
    """A kept build.

    Raises:
        BuildError: there is none of this name, it is not for this CPU, or its functions have other arguments.
    """
    from engine.model_runner.kernels.cpu.compiler import NoLibraryError
    from engine.model_runner.kernels.cpu.library import open_library

    file, wanted = folder / f"{name}.so", folder / f"{name}.interface"
    if not file.is_file() or not wanted.is_file():
        raise BuildError(
            f"no build {name!r} in {folder}: make one with `kernel_builds.py --folder {folder} keep {name}`"
        )
    if wanted.read_text() != interface():
        raise BuildError(
            f"the functions of build {name!r} take other arguments than those of this engine's library"
        )
    try:
        return open_library(file)
    except NoLibraryError as error:
        raise BuildError(str(error)) from error


def compare_results(names: Sequence[str], results: Sequence[Tensor]) -> list[float]:
    """Root mean square difference of each build's results from the first one's, relative to those.

    Raises:
        BuildError: a difference is too large.
    """
    first = results[0].double()
    differences = [float((other.double() - first).norm() / first.norm()) for other in results]
    for name, difference in zip(names, differences, strict=True):
        if not difference <= MOST_DIFFERENCE:
            raise BuildError(
                f"results of {name} differ by {difference:.1%} from {names[0]}, more than {MOST_DIFFERENCE:.0%}"
            )
    return differences


def make_decodes(num_requests: int, mean_length: int) -> Decodes:
    """The pages of the requests in contiguous runs, in random order."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(mean_length // 2, mean_length * 3 // 2 + 1, num_requests)
    num_runs = -(-lengths // (RUN_PAGES * PAGE_SIZE))
    starts = 1 + rng.permutation(num_runs.sum()) * RUN_PAGES  # page 0 is the dummy page
    table = np.zeros((num_requests, num_runs.max() * RUN_PAGES * PAGE_SIZE), dtype=np.int32)
    for row, mine in zip(table, np.split(starts, np.cumsum(num_runs)[:-1]), strict=True):
        slots = mine[:, None] * PAGE_SIZE + np.arange(RUN_PAGES * PAGE_SIZE)
        row[: slots.size] = slots.reshape(-1)
    return Decodes(lengths, table, int(num_runs.sum()) * RUN_PAGES)


def make_builds(
    libraries: Sequence[ctypes.CDLL], decodes: Decodes, num_layers: int, dtype: torch.dtype
) -> list[Build]:
    """All builds, with the same keys and values."""
    import torch

    from engine.model_runner.attention.backend import BatchLayout
    from engine.model_runner.attention.cpu_native import CpuNativeAttention
    from engine.model_runner.memory.io_buffers import InputBuffers

    pool = make_kv_pool(num_layers, decodes.num_pages, dtype)
    ones = np.ones_like(decodes.lengths)
    layout = BatchLayout(np.arange(len(ones)), decodes.lengths - 1, ones, 0)
    spec, table = model_spec(num_layers), torch.from_numpy(decodes.table)
    buffers = InputBuffers(torch.device("cpu"))
    backends = [CpuNativeAttention(spec, pool, table, buffers, library) for library in libraries]
    return [Build(backend, backend.plan_step(layout)) for backend in backends]


def measure(
    builds: Sequence[Build], q: Tensor, num_layers: int, rounds: int, *, is_cold: bool
) -> npt.NDArray[np.float64]:
    """Seconds of all layers, [rounds, builds].

    Args:
        q: [N, HEADS, HEAD_DIM] bfloat16.
    """
    import torch

    other = torch.ones(COLD_BYTES // 4) if is_cold else None
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


def report(
    names: Sequence[str], differences: Sequence[float], seconds: npt.NDArray[np.float64], num_keys: int
) -> list[str]:
    """One line per build; its ratio to the first is the median of the rounds' ratios, followed by quartiles.

    Args:
        seconds: [rounds, builds], of all threads together.
    """
    width = max(len("build"), *map(len, names))
    lines = [f"{'build':{width}} {'ns a key':>9} {'ratio':>6}  {'quartiles':14}  results"]
    for name, difference, mine in zip(names, differences, seconds.T, strict=True):
        low, middle, high = np.quantile(mine / seconds[:, 0], [0.25, 0.5, 0.75])
        per_key = np.median(mine) * 1e9 / num_keys
        results = "the same" if difference == 0 else f"{difference:.2%} off"
        lines.append(f"{name:{width}} {per_key:9.2f} {middle:6.3f}  {low:.3f} to {high:.3f}  {results}")
    return lines


if __name__ == "__main__":
    main()
