"""The engine's CPU kernels compared with plain torch: each kernel alone, then whole steps of a model.

    python benchmarks/cpu_kernels.py [--threads 2] [--what kernels steps] [--cpu-time]
    python benchmarks/cpu_kernels.py --what compressed [--isa avx512_vnni]    # weights of 12 bits beside 16 bits

Both sides run in turn, in one process, on the same inputs; the shortest run of each counts, because other
load can only make a run slower. `--cpu-time` counts the CPU time of this process's threads instead of wall time: use it
with one thread if other work keeps the cores busy. Weights of steps are random (`--load-format dummy`), the
shapes those of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.player import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    MAX_LEN,
    MAX_REQUESTS,
    PAGE_SIZE,
    VOCAB,
    make_kv_pool,
    make_player,
    model_spec,
)
from engine.launch.child.process_resources import shorten_spinning
from engine.model_runner.kernels.cpu.compiler import ISAS, Isa


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        work: bytes read or operations, see `unit`; the table shows them per nanosecond.
    """

    name: str
    torch: Callable[[], object]
    native: Callable[[], object]
    work: float
    unit: str
    rounds: int = 30


def main() -> None:
    """Run the chosen comparisons."""
    parser = argparse.ArgumentParser(description="CPU kernels compared with plain torch")
    parser.add_argument("--threads", type=int, default=2)
    parts = ["kernels", "steps", "compressed"]
    parser.add_argument("--what", nargs="+", choices=parts, default=parts[:2])
    parser.add_argument("--isa", choices=ISAS, help="of compressed weights; this CPU's best by default")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    import torch

    from engine.model_runner.kernels.cpu.library import reasons_against_library

    torch.set_num_threads(args.threads)
    if "steps" in args.what and (reasons := reasons_against_library()):
        sys.exit(f"steps would compare torch with itself: {'; '.join(reasons)}; use --what kernels")
    clock = time.process_time if args.cpu_time else time.perf_counter
    print(f"{'':44} {'torch us':>10} {'native us':>10} {'ratio':>6}")
    with torch.inference_mode():
        if "kernels" in args.what:
            for case in itertools.chain(linears(), small_operations(), attention()):
                show(case, clock)
        if "compressed" in args.what:
            print("left: 16 bits, right: 12 bits")
            for case in compressed(args.isa):
                show(case, clock)
        if "steps" in args.what:
            show_steps(args.threads, clock)


def show(case: Case, clock: Callable[[], float]) -> None:
    """Both sides in turn; the shortest of each."""
    best = {"torch": float("inf"), "native": float("inf")}
    for _ in range(case.rounds):
        for name, work in (("torch", case.torch), ("native", case.native)):
            started_s = clock()
            work()
            best[name] = min(best[name], clock() - started_s)
    ratio = best["torch"] / best["native"]
    rate = f"{case.work / best['native'] / 1e9:8.1f} {case.unit}" if case.work else ""
    print(
        f"{case.name:44} {best['torch'] * 1e6:10.1f} {best['native'] * 1e6:10.1f} {ratio:6.2f} {rate}",
        flush=True,
    )


# ---------------------------------------------------------------- kernels


def linears() -> Iterator[Case]:
    """All linear layers of the model, one after the other: its whole footprint is read, as in a step."""
    import torch

    from engine.model_runner.kernels import plain
    from engine.model_runner.kernels.native import native_ops

    shapes = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN)]
    shapes += [(HIDDEN, INNER)]
    weights = [torch.randn(shape).to(torch.bfloat16) for _ in range(LAYERS) for shape in shapes]
    weights.append(torch.randn(VOCAB, HIDDEN).to(torch.bfloat16))
    ops = native_ops()
    sides = [[pack(weight) for weight in weights] for pack in (plain.pack_linear_onednn, ops.pack_linear)]
    numbers = sum(weight.numel() for weight in weights)
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 256, 512):
        xs = {size: torch.randn(num_tokens, size).to(torch.bfloat16) for size in (HIDDEN, INNER)}

        def run(side: list[Any], xs: dict[int, Any] = xs) -> None:
            for linear, weight in zip(side, weights, strict=True):
                linear(xs[weight.shape[1]])

        yield Case(
            f"all linears, {num_tokens} tokens (torch: oneDNN)",
            lambda run=run: run(sides[0]),  # type: ignore[misc]
            lambda run=run: run(sides[1]),  # type: ignore[misc]
            2 * numbers if num_tokens < 16 else 2 * numbers * num_tokens,
            "GB/s" if num_tokens < 16 else "GFLOP/s",
            rounds=20 if num_tokens < 64 else 6,
        )


def compressed(isa: Isa | None) -> Iterator[Case]:
    """All linear layers with bfloat16 weights stored in 12 and in 16 bits; the results must be bit-identical."""
    import torch

    from engine.model_runner.kernels.cpu.library import load_library
    from engine.model_runner.kernels.native_linear import NativeLinear

    library = load_library(isa)
    layer = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN)]
    layer.append((HIDDEN, INNER))
    sides: tuple[list[Any], list[Any]] = ([], [])
    shapes = [*layer * LAYERS, (VOCAB, HIDDEN)]
    for outputs, inputs in shapes:
        plain = NativeLinear(library, (torch.randn(outputs, inputs) / inputs**0.5).to(torch.bfloat16))
        packed = plain.compressed()
        if packed is None:
            sys.exit("this ISA target has no matmuls with compressed weights")
        for side, linear in zip(sides, (plain, packed), strict=True):
            if outputs == 2 * INNER:
                linear.fuse_silu_and_mul()
            side.append(linear)
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 512):
        xs = {size: torch.randn(num_tokens, size).to(torch.bfloat16) for size in (HIDDEN, INNER)}
        for plain, packed, (_, inputs) in zip(*sides, shapes, strict=True):
            if not torch.equal(plain(xs[inputs]), packed(xs[inputs])):
                sys.exit(f"{num_tokens} tokens: the two results are not bit-identical")

        def run(side: list[Any], xs: dict[int, Any] = xs) -> None:
            for linear, (_, inputs) in zip(side, shapes, strict=True):
                linear(xs[inputs])

        num_bytes = 1.5 * sum(outputs * inputs for outputs, inputs in shapes)
        yield Case(
            f"all linears, {num_tokens} tokens",
            partial(run, sides[0]),
            partial(run, sides[1]),
            num_bytes,
            "GB/s",
        )


def small_operations() -> Iterator[Case]:
    """The kernels between the matmuls."""
    import torch

    from engine.model_runner.kernels import plain
    from engine.model_runner.kernels.native import native_ops
    from engine.model_runner.ops.rotation import LayerKV, RotaryStore

    ops = native_ops()
    for num_tokens in (1, 64, 1024):
        x, residual = (torch.randn(num_tokens, HIDDEN).to(torch.bfloat16) for _ in range(2))
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
        gate_up = torch.randn(num_tokens, 2 * INNER).to(torch.bfloat16)
        qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(torch.bfloat16)
        cos = sin = torch.ones(num_tokens, HEAD_DIM, dtype=torch.bfloat16)
        kv = LayerKV(*(torch.zeros(2048, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in "kv"))
        loc = torch.randperm(2048)[:num_tokens]
        for name, arguments in {
            "add_rms_norm": (x, residual, weight, 1e-5),
            "silu_and_mul": (gate_up,),
            "rotate_and_store": (qkv, None, RotaryStore(cos, sin, kv, loc)),
        }.items():
            theirs, ours = getattr(plain, name), getattr(ops, name)
            yield Case(
                f"{name}, {num_tokens} tokens",
                lambda f=theirs, a=arguments: f(*a),  # type: ignore[misc]
                lambda f=ours, a=arguments: f(*a),  # type: ignore[misc]
                0.0,
                "",
                rounds=300,
            )


def attention() -> Iterator[Case]:
    """One layer, keys and values on pages in random order."""
    import numpy as np
    import torch

    from engine.model_runner.attention.backend import BatchLayout
    from engine.model_runner.attention.cpu_native import CpuNativeAttention
    from engine.model_runner.attention.torch_native import TorchNativeAttention
    from engine.model_runner.memory.io_buffers import InputBuffers

    device = torch.device("cpu")
    num_pages = MAX_REQUESTS * MAX_LEN // PAGE_SIZE
    kv_pool = make_kv_pool(1, num_pages, torch.bfloat16)
    for num_requests, length, shared, new in (
        (1, 256, 0, 1),
        (1, 1024, 0, 1),
        (16, 512, 0, 1),
        (64, 512, 0, 1),
        (64, 1056, 1024, 1),
        (1, 1900, 0, 1900),
        (1, 1024, 0, 256),
    ):
        pages = np.random.default_rng(0).permutation(np.arange(1, num_pages + 1))
        pages = pages[: num_requests * (MAX_LEN // PAGE_SIZE)].reshape(num_requests, -1)
        pages[:, : shared // PAGE_SIZE] = pages[0, : shared // PAGE_SIZE]
        slots = (pages[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(num_requests, -1)
        table = torch.from_numpy(slots.astype(np.int32))
        layout = BatchLayout(
            np.arange(num_requests),
            np.full(num_requests, length - new),
            np.full(num_requests, new),
            0 if new == 1 else num_requests,
        )
        q = torch.randn(num_requests * new, HEADS, HEAD_DIM).to(torch.bfloat16)
        steps = [
            backend(model_spec(1), kv_pool, table, InputBuffers(device)).plan_step(layout)
            for backend in (TorchNativeAttention, CpuNativeAttention)
        ]
        operations = 4 * HEADS * HEAD_DIM * num_requests * new * (length - new / 2)
        yield Case(
            f"attention, {num_requests} x {new} new of {length}, {shared} shared",
            lambda step=steps[0], q=q: step.forward(0, q),  # type: ignore[misc]
            lambda step=steps[1], q=q: step.forward(0, q),  # type: ignore[misc]
            operations if new > 1 else 4.0 * num_requests * length * KV_HEADS * HEAD_DIM,
            "GFLOP/s" if new > 1 else "GB/s of keys and values as if nothing were shared",
            rounds=10,
        )


# ---------------------------------------------------------------- whole steps


@contextmanager
def without_native() -> Iterator[None]:
    """Runners loaded inside this context compute with torch and oneDNN only."""
    from engine.model_runner import assembly, load, op_selection
    from engine.model_runner.attention import selection

    providers = {
        op: [provider for provider in providers if provider.name != "native"]
        for op, providers in op_selection.PROVIDERS.items()
    }
    backends = tuple(backend for backend in selection.BACKENDS if backend.name != "native")
    with (
        patch.object(load, "select_ops", lambda target: op_selection.select_ops(target, providers)),
        patch.object(assembly, "select_backend", partial(selection.select_backend, backends=backends)),
    ):
        yield


def show_steps(num_threads: int, clock: Callable[[], float]) -> None:
    """Decode steps and a prompt through the whole runner: plan, model, sampling."""
    with without_native():
        theirs = make_player(num_threads)
    players = {"torch": theirs, "native": make_player(num_threads)}
    source = random.Random(0)
    for num_requests, length, shared in (
        (1, 256, 0),
        (1, 1024, 0),
        (16, 512, 0),
        (64, 512, 0),
        (64, 1056, 1024),
    ):
        prompts = [[source.randrange(VOCAB) for _ in range(length)] for _ in range(num_requests)]
        best = dict.fromkeys(players, float("inf"))
        for turn in range(12):
            for name, player in players.items():
                # The first step adds the requests; their context is what the pool contains.
                tokens = prompts if turn == 0 else None
                started_s = clock()
                player.step([length + turn] * num_requests, 1, tokens, shared)
                if turn:
                    best[name] = min(best[name], clock() - started_s)
        for player in players.values():
            player.finished = list(range(num_requests))
        show_step(f"decode step, {num_requests} x {length}, {shared} shared", best)
    best = dict.fromkeys(players, float("inf"))
    for _ in range(3):
        prompt = [source.randrange(VOCAB) for _ in range(1900)]
        for name, player in players.items():
            started_s = clock()
            player.step([1900], 1900, [prompt])
            best[name] = min(best[name], clock() - started_s)
            player.finished = [0]
    show_step("prompt of 1,900 tokens", best)


def show_step(name: str, best: dict[str, float]) -> None:
    """One line of the table."""
    ratio = best["torch"] / best["native"]
    print(f"{name:44} {best['torch'] * 1e6:10.0f} {best['native'] * 1e6:10.0f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    shorten_spinning()
    main()
