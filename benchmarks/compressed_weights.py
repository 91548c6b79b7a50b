"""Matmuls with bfloat16 weights stored in 12 and in 16 bits, in turn, in one process: the gain of compression.

    python benchmarks/compressed_weights.py [--tokens 1 4 8 64 512] [--isa avx512_vnni] [--rounds 40] [--threads 2]

All linear layers of a model like SmolLM2-135M, one after the other, so that its whole footprint is read, as in a step.
Both sides have the same values; the results are compared first and must be bit-identical. The figure is the ratio
within a round, because memory bandwidth of a shared machine changes from minute to minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.kernel_builds import at_least
from benchmarks.smollm2 import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB
from engine.launch.child.openmp import shorten_spinning
from engine.model_runner.kernels.cpu.isa import ISAS

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    from torch import Tensor

    from engine.model_runner.kernels.compressed_linear import CompressedLinear
    from engine.model_runner.kernels.native_linear import NativeLinear

_QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
LAYER_SHAPES = ((_QKV, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""[N, K] of a layer's weights; gate and up of the MLP include the activation."""
HEAD_SHAPE = (VOCAB, HIDDEN)


class ComparisonError(Exception):
    """There is nothing to compare on this machine, or the two sides differ."""


class Weight(NamedTuple):
    """One weight in both forms."""

    inputs: int
    plain: NativeLinear
    compressed: CompressedLinear


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description="weights of 12 and 16 bits, in turn")
    parser.add_argument("--tokens", nargs="+", type=at_least(1), default=[1, 2, 4, 6, 8, 12, 16, 32, 64, 512])
    parser.add_argument("--isa", choices=ISAS, help="ISA target; this CPU's best by default")
    parser.add_argument("--layers", type=at_least(1), default=LAYERS)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=40)
    args = parser.parse_args()
    try:
        compare(args)
    except ComparisonError as error:
        sys.exit(str(error))


def compare(args: argparse.Namespace) -> None:
    """Measure the chosen cases.

    Raises:
        ComparisonError: this ISA target compresses no weights, or the two sides differ.
    """
    shorten_spinning()  # before torch is imported
    import torch

    from engine.model_runner.kernels.cpu.compiler import NoLibraryError
    from engine.model_runner.kernels.cpu.library import load_library

    torch.set_num_threads(args.threads)
    try:
        library = load_library(args.isa)
    except NoLibraryError as error:
        raise ComparisonError(str(error)) from error
    weights = make_weights(library, args.layers)
    plain_mb = sum(weight.plain.num_bytes for weight in weights) / 1e6
    compressed_mb = sum(weight.compressed.num_bytes for weight in weights) / 1e6
    print(f"{len(weights)} weights, {plain_mb:.0f} MB uncompressed, {compressed_mb:.0f} MB compressed")
    print(f"{'tokens':>6} {'16 bits, ms':>11} {'12 bits, ms':>11} {'ratio':>6}  quartiles")
    for num_tokens in args.tokens:
        print(report(num_tokens, measure(weights, num_tokens, args.rounds)), flush=True)


def make_weights(library: ctypes.CDLL, num_layers: int) -> list[Weight]:
    """Random weights of a model, in both forms.

    Raises:
        ComparisonError: this ISA target compresses none.
    """
    import torch

    from engine.model_runner.kernels.native_linear import NativeLinear

    generator = torch.Generator().manual_seed(0)
    weights = []
    for outputs, inputs in (*LAYER_SHAPES * num_layers, HEAD_SHAPE):
        numbers = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        plain = NativeLinear(library, numbers.to(torch.bfloat16))
        compressed = plain.compressed()
        if compressed is None:
            raise ComparisonError("this ISA target has no matmuls with compressed weights")
        if outputs == 2 * INNER:
            plain.fuse_silu_and_mul()
            compressed.fuse_silu_and_mul()
        weights.append(Weight(inputs, plain, compressed))
    return weights


def measure(weights: Sequence[Weight], num_tokens: int, rounds: int) -> npt.NDArray[np.float64]:
    """Seconds of all matmuls, [rounds, 2]: plain and compressed.

    Raises:
        ComparisonError: their results are not bit-identical.
    """
    import torch

    xs = {inputs: torch.randn(num_tokens, inputs).to(torch.bfloat16) for inputs in (HIDDEN, INNER)}
    for weight in (*weights[: len(LAYER_SHAPES)], weights[-1]):
        x = xs[weight.inputs]
        if not torch.equal(weight.plain(x), weight.compressed(x)):
            raise ComparisonError(f"{num_tokens} tokens: the two results are not bit-identical")
    inputs = [xs[weight.inputs] for weight in weights]
    sides = ([weight.plain for weight in weights], [weight.compressed for weight in weights])
    rng = np.random.default_rng(0)
    seconds = np.zeros((rounds + 1, 2))
    for row in seconds:
        for side in rng.permutation(2):
            row[side] = run(sides[side], inputs)
    return seconds[1:]  # the first round warms up


def run(products: Sequence[NativeLinear | CompressedLinear], xs: Sequence[Tensor]) -> float:
    """Seconds of all matmuls, one after the other."""
    start = time.perf_counter()
    for product, x in zip(products, xs, strict=True):
        product(x)
    return time.perf_counter() - start


def report(num_tokens: int, seconds: npt.NDArray[np.float64]) -> str:
    """A line; the ratio is the median of the rounds' ratios, followed by quartiles. `seconds`: [rounds, 2]."""
    plain, compressed = np.median(seconds, axis=0) * 1e3
    low, middle, high = np.quantile(seconds[:, 1] / seconds[:, 0], [0.25, 0.5, 0.75])
    return f"{num_tokens:6} {plain:11.2f} {compressed:11.2f} {middle:6.3f}  {low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
