"""A step of an encoder and its matmuls alone, in turn, in one process: how much of the matmul limit a step reaches.

    python benchmarks/encoder_step.py [--tokens 2000] [--dtype bfloat16] [--threads 2] [--rounds 30]

Random weights in the shape of MiniLM-L6 (6 layers x 384, 12 heads of 32), texts of 16 to 256 tokens. The share of the
limit is the ratio within a round, because the speed of a shared machine changes from minute to minute; tokens/s are
those of the fastest round. Then the time of each operation, the fastest of all rounds for each call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.kernel_builds import at_least
from engine.launch.child.openmp import shorten_spinning
from engine.models.source import ModelSource
from engine.models.spec.encoder_spec import EncoderSpec
from engine.models.spec.model_spec import ModelSpec
from engine.models.spec.pooling_spec import PoolingSpec
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.runtime.feasibility import Capacity, pages_for
from engine.runtime.pooling import PoolingParams
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, NewReq, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.model_runner.model_runner import ModelRunner

HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 384, 1536, 6, 12, 512
SPEC: Final = ModelSpec(
    model_type="bert",
    vocab_size=30522,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=HIDDEN // HEADS,
    rms_norm_eps=1e-12,
    rope_theta=1e4,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=True,
    torch_dtype="float32",
    attention_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    encoder=EncoderSpec(post_norm=True, activation="gelu", position_rows=POSITIONS, token_types=2),
    pooling=PoolingSpec(task="embed", pooling="mean", size=HIDDEN, normalize=True),
)
SHAPES: Final = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
"""[N, K] of a layer's weights."""
_PAGE: Final = 16
_LONGEST: Final = 256
_POOLING: Final = PoolingParams(all_tokens=True, normalize=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="an encoder's step and its matmuls alone, in turn")
    parser.add_argument("--tokens", type=at_least(16), default=2000, help="of all texts of a step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=30)
    args = parser.parse_args()
    shorten_spinning()
    lengths = text_lengths(args.tokens)
    runner = make_runner(args.dtype, args.threads, lengths)
    plans = Plans(lengths)
    products = make_products(args.dtype, args.tokens)
    steps, shares = [], []
    for _ in range(args.rounds + 1):
        started_s = time.perf_counter()
        result = runner.launch(plans.next()).wait()
        step_s = time.perf_counter() - started_s
        assert len(result.vectors) == len(lengths) and not result.errors
        started_s = time.perf_counter()
        products()
        steps.append(step_s)
        shares.append((time.perf_counter() - started_s) / step_s)
    steps, shares = steps[1:], shares[1:]  # the first round allocates
    tflops = 2 * args.tokens * LAYERS * sum(n * k for n, k in SHAPES) / min(steps) / 1e12
    print(
        f"{args.dtype}, {args.threads} threads: {args.tokens} tokens of {len(lengths)} texts in "
        f"{min(steps) * 1e3:.1f} ms, {args.tokens / min(steps):.0f} tokens/s, {tflops:.3f} TFLOP/s of matmuls, "
        f"{statistics.median(shares):.0%} of the matmul limit"
    )
    for name, seconds in operations(runner, plans, args.rounds).most_common():
        print(f"  {name:22} {seconds * 1e3:8.2f} ms")


def text_lengths(tokens: int) -> list[int]:
    """Lengths from 16 to 256 that add up to `tokens`; the last one may be shorter."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(random.integers(16, _LONGEST + 1))))
    return lengths


def make_runner(dtype: Any, num_threads: int, lengths: Sequence[int]) -> ModelRunner:
    """A runner with random weights and room for these texts."""
    from engine.model_runner.load import load_model_runner

    num_pages = sum(pages_for(length, _PAGE) for length in lengths)
    model = ModelConfig(dtype=dtype, device="cpu", num_threads=num_threads, load_format="dummy", seed=1)
    config = EngineConfig(model=model, cache=CacheConfig(page_size=_PAGE))
    capacity = Capacity(POSITIONS, num_pages, _PAGE, len(lengths), SPEC.vocab_size, 0)
    return load_model_runner(config, ModelSource("hf", "dummy", "dummy"), SPEC, capacity)


def make_products(dtype: str, tokens: int) -> Any:
    """A function that multiplies as a step does, and nothing else."""
    import torch

    from engine.model_runner.op_selection import Target, select_ops

    kind = getattr(torch, dtype)
    pack = select_ops(Target(SPEC, torch.device("cpu"), kind)).pack_linear
    pairs = [
        (pack(torch.randn(rows, columns).mul_(0.02).to(kind)), torch.randn(tokens, columns).to(kind))
        for _ in range(LAYERS)
        for rows, columns in SHAPES
    ]

    @torch.inference_mode()
    def multiply() -> None:
        for weight, x in pairs:
            weight(x)

    return multiply


class Plans:
    """Plans of steps with new texts of the same lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._random = np.random.default_rng(1)
        self._step_id = 0
        first = 1
        slots: list[int] = []
        for length in lengths:
            slots += range(first * _PAGE, first * _PAGE + length)
            first += pages_for(length, _PAGE)
        self._slots = _int32(slots)

    def next(self) -> StepPlan:
        """The plan of the next step."""
        self._step_id += 1
        rows = range(len(self._lengths))
        texts = [self._random.integers(0, SPEC.vocab_size, length) for length in self._lengths]
        return StepPlan(
            step_id=self._step_id,
            mode=ForwardMode.EXTEND,
            rows=_int32(rows),
            num_computed_tokens=_int32([0] * len(rows)),
            num_scheduled_tokens=_int32(self._lengths),
            out_cache_loc=self._slots,
            samples=bytes(len(rows)),
            pools=bytes([1]) * len(rows),
            total_num_scheduled_tokens=sum(self._lengths),
            finished_rows=_int32(rows) if self._step_id > 1 else b"",
            new_reqs=tuple(
                NewReq(f"r{row}", row, _int32(text), len(text), b"", SamplingParams(seed=0), _POOLING)
                for row, text in zip(rows, texts, strict=True)
            ),
        )


def operations(runner: Any, plans: Plans, rounds: int) -> Counter[str]:
    """Seconds of each library function in a step that is run call by call; empty without our kernels."""
    from engine.model_runner.kernels.cpu.library import load_library, reasons_against_library

    if reasons_against_library():
        return Counter()
    hook: Any = load_library().call_hook
    runs = []
    runner.executor.forward = runner.model.forward
    for _ in range(rounds):
        calls = [("start", time.perf_counter())]
        hook.on_call = lambda function, _arguments, calls=calls: calls.append(
            (function.name, time.perf_counter())
        )
        try:
            runner.launch(plans.next()).wait()
        finally:
            hook.on_call = None
        runs.append([(name, end_s - start_s) for (_, start_s), (name, end_s) in pairwise(calls)])
    totals: Counter[str] = Counter()
    for same in zip(*runs, strict=True):
        totals[same[0][0]] += min(seconds for _, seconds in same)
    return totals


def _int32(numbers: Any) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


if __name__ == "__main__":
    main()
