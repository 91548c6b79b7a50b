"""The limits of this machine's CPU: read bandwidth at a model's footprint, and matmul rates.

    python benchmarks/ceilings.py [--megabytes 269 98] [--threads 1 2] [--json FILE]

The bandwidth is measured by reading memory of the size of the model's weights once per round, as a step does; a large
cache keeps as much from round to round as from step to step. The memory is in huge pages if Linux grants them, like
the engine's weights.

Rates are those of oneDNN: packed weights in bf16; the same in fp32, because bf16 values may be multiplied in either and
some CPUs are slower in bf16, or have none (`Machine.product_rate` of `peers/limits.py` takes the better one); and int8
on unsigned activations (AVX-512 VNNI or AMX) through torch's quantized linear layer, left out if torch has none. Each
figure is the best of many short runs, because other load can only make a run slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.launch.child.process_resources import shorten_spinning
from engine.model_runner.memory.huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, find_madvise

if TYPE_CHECKING:
    import torch

BF16_MEGABYTES = 269  # SmolLM2-135M in bf16, the output head tied to the embedding
Q4_1_MEGABYTES = 98  # its GGUF file, Q4_1 with the embedding in Q8_0
INPUTS, OUTPUTS = 576, 3072  # gate and up of SmolLM2-135M, its largest linear layer but the head
FEW_TOKENS, MANY_TOKENS = 64, 512  # of a matmul: a full decode batch, a chunk of a prompt
ROUNDS = 30


class Ceiling(msgspec.Struct, frozen=True):
    """One figure of the machine.

    Attributes:
        what: "read" in GB/s, or "bf16", "fp32" or "int8" matmuls in GFLOP/s or GOP/s.
        size: megabytes that are read, tokens that are multiplied.
    """

    what: str
    size: int
    num_threads: int
    rate: float

    def __str__(self) -> str:
        """The figure as one line of text."""
        if self.what == "read":
            return f"read bandwidth, {self.size} MB, {self.num_threads} threads: {self.rate:6.1f} GB/s"
        unit = "GOP/s" if self.what == "int8" else "GFLOP/s"
        return f"{self.what} product, M={self.size}, {self.num_threads} threads: {self.rate:6.0f} {unit}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="the limits of this CPU")
    parser.add_argument(
        "--megabytes",
        type=int,
        nargs="+",
        default=[BF16_MEGABYTES, Q4_1_MEGABYTES],
        help="footprints: bytes of a model's weights / 10^6",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="also write them to this file")
    args = parser.parse_args()
    ceilings = []
    for ceiling in measure(args.megabytes, args.threads):
        print(ceiling, flush=True)
        ceilings.append(ceiling)
    if args.json:
        args.json.write_bytes(msgspec.json.encode(ceilings) + b"\n")


def measure(megabytes: Sequence[int], threads: Sequence[int]) -> Iterable[Ceiling]:
    """All figures, one after the other; sets torch's number of threads."""
    import torch

    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for size in megabytes:
            yield Ceiling("read", size, num_threads, read_bandwidth(size))
        for num_tokens in (FEW_TOKENS, MANY_TOKENS):
            for what, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
                if rate := product_rate(num_tokens, dtype):
                    yield Ceiling(what, num_tokens, num_threads, rate)
        for num_tokens in (FEW_TOKENS, MANY_TOKENS):
            if rate := int8_product_rate(num_tokens):
                yield Ceiling("int8", num_tokens, num_threads, rate)


def best_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The shortest of many runs."""
    work()
    shortest = float("inf")
    for _ in range(rounds):
        started_s = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - started_s)
    return shortest


def read_bandwidth(megabytes: int) -> float:
    """GB/s of reading once through so much memory with torch's threads."""
    import torch

    memory = torch.empty(megabytes * 1_000_000 // 4, dtype=torch.float32)
    ask_for_huge_pages(memory.data_ptr(), memory.nbytes)
    memory.fill_(1.0)
    return memory.nbytes / best_s(memory.amax) / 1e9


def ask_for_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask for huge pages for untouched memory; returns whether the system accepted it."""
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole_bytes = (address + num_bytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    madvise = find_madvise()
    return madvise is not None and whole_bytes > 0 and madvise(start, whole_bytes, MADV_HUGEPAGE) == 0


def product_rate(num_tokens: int, dtype: torch.dtype, inputs: int = INPUTS, outputs: int = OUTPUTS) -> float:
    """GFLOP/s of one linear layer through oneDNN; 0.0 if it has none for this CPU (bf16 without AVX-512)."""
    import torch

    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs).to(dtype), None)
    except RuntimeError:
        return 0.0
    x = torch.randn(num_tokens, inputs).to(dtype)
    multiply = torch.ops.mkldnn._linear_pointwise
    taken_s = best_s(lambda: multiply(x, weight, None, "none", [], ""))
    return 2 * num_tokens * inputs * outputs / taken_s / 1e9


def int8_product_rate(num_tokens: int, inputs: int = INPUTS, outputs: int = OUTPUTS) -> float:
    """GOP/s of one linear layer of int8 weights and uint8 activations through oneDNN; 0.0 if torch has no such layer.

    Its output is float32, like that of a kernel that continues in floating point.
    """
    import torch

    scale, zero = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    x = torch.randint(0, 255, (num_tokens, inputs), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (inputs, outputs), dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight.t().contiguous(), list(x.shape))
        multiply = torch.ops.onednn.qlinear_pointwise

        def work() -> object:
            return multiply(x, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], "")

        taken_s = best_s(work)
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0.0
    return 2 * num_tokens * inputs * outputs / taken_s / 1e9


if __name__ == "__main__":
    shorten_spinning()
    main()
