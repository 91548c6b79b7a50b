"""Decode steps of two checkouts in turn: the cost or gain of a change of the runner.

    python benchmarks/step_compare.py OLD NEW [--rounds 15] [--steps 40] [--num-threads 1]

OLD and NEW are folders named `engine`, checkouts of this repository. Each is a process with a model runner of
SmolLM2-135M's shape and random weights (`smollm2`). They take turns, some steps each, so that other load affects
both. A row is one case: the median microseconds of a step of each, by CPU time of the process, and the median of
the rounds' ratios NEW / OLD, by CPU time (which other processes disturb less) and by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

LAYERS: Final = 30
"""Of SmolLM2-135M."""

LENGTH: Final = 100
"""Tokens of a request before its first decode."""


@dataclass(frozen=True)
class Case:
    """Decodes of `num_requests`, in bursts of `num_rounds`; `quantization` is a value of `--quantization`."""

    quantization: str
    num_requests: int
    num_rounds: int = 1

    def __str__(self) -> str:
        burst = f", bursts of {self.num_rounds}" if self.num_rounds > 1 else ""
        return f"{self.quantization}, {self.num_requests} requests{burst}"


CASES: Final = (
    Case("none", 1),
    Case("none", 64),
    Case("int4", 1),
    Case("int4", 1, 8),
    Case("int4", 64),
)


def main() -> None:
    """Print one row per case, or run as one of the two processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path, nargs="*", help="OLD and NEW")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS, help="fewer leave more of a step to the host")
    parser.add_argument("--quantization", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quantization:
        work(options)
        return
    old, new = options.checkouts
    print(f"{'':28} {'old us':>9} {'new us':>9} {'cpu':>7} {'clock':>7}")
    for quantization in dict.fromkeys(case.quantization for case in CASES):
        processes = [start(path, quantization, options) for path in (old, new)]
        for case in (case for case in CASES if case.quantization == quantization):
            compare(case, processes, options.rounds)
        for process in processes:
            cast("IO[str]", process.stdin).close()
            process.wait()


def start(checkout: Path, quantization: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """The process of one checkout."""
    root = checkout.resolve()
    command = [sys.executable, str(Path(__file__).resolve()), "--quantization", quantization]
    command += ["--steps", str(options.steps), "--num-threads", str(options.num_threads)]
    command += ["--layers", str(options.layers)]
    environment = {**os.environ, "PYTHONPATH": f"{root.parent}{os.pathsep}{root}"}
    return subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def compare(case: Case, processes: list[subprocess.Popen[str]], num_rounds: int) -> None:
    """Let both processes take turns, and print the row."""
    taken: dict[str, list[list[float]]] = defaultdict(lambda: [[], []])
    for turn in range(num_rounds + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        for which in order:
            process = processes[which]
            print(json.dumps([case.num_requests, case.num_rounds]), file=process.stdin, flush=True)
            answer = json.loads(cast("IO[str]", process.stdout).readline())
            if turn:  # the first one warms up
                for name, micros in answer.items():
                    taken[name][which].append(micros)
    ratios = {
        name: statistics.median(new / old for old, new in zip(*both, strict=True))
        for name, both in taken.items()
    }
    old_us, new_us = (statistics.median(values) for values in taken["cpu"])
    print(f"{case!s:28} {old_us:9.0f} {new_us:9.0f} {ratios['cpu']:7.3f} {ratios['clock']:7.3f}", flush=True)


def work(options: argparse.Namespace) -> None:
    """Answer each line of stdin, numbers of requests and rounds, by the medians of some steps."""
    import torch
    from msgspec.structs import replace

    from benchmarks.player import MAX_LEN, MAX_REQUESTS, Player
    from benchmarks.smollm2 import PAGE_SIZE, VOCAB, model_spec
    from engine.model_runner.load import load_model_runner
    from engine.models.source import ModelSource
    from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig
    from engine.runtime.feasibility import Capacity

    torch.set_num_threads(options.num_threads)
    model = ModelConfig(
        dtype="bfloat16",
        device="cpu",
        num_threads=options.num_threads,
        load_format="dummy",
        seed=1,
        quantization=options.quantization,
    )
    capacity = Capacity(MAX_LEN, MAX_REQUESTS * MAX_LEN // PAGE_SIZE, PAGE_SIZE, MAX_REQUESTS, VOCAB, 0)
    config = EngineConfig(model=model, cache=CacheConfig(page_size=PAGE_SIZE))
    source = ModelSource("hf", "dummy", "benchmark")
    player = Player(load_model_runner(config, source, model_spec(options.layers), capacity))

    def burst(num_requests: int, length: int, num_rounds: int) -> Any:
        plans = [player.plan([length + n] * num_requests, 1, None) for n in range(num_rounds)]
        loc = b"".join(plan.out_cache_loc for plan in plans)
        return replace(plans[0], out_cache_loc=loc, num_rounds=num_rounds)

    num_started = 0
    for line in sys.stdin:
        num_requests, num_rounds = json.loads(line)
        if num_requests > num_started:  # each turn decodes the same positions again
            prompts = [[(7 * row + n) % VOCAB for n in range(LENGTH)] for row in range(num_requests)]
            player.finished = list(range(num_started))
            player.step([LENGTH] * num_requests, LENGTH, prompts)
            num_started = num_requests
        taken: dict[str, list[float]] = {"cpu": [], "clock": []}
        for number in range(options.steps):
            plan = burst(num_requests, LENGTH + 1 + number * num_rounds, num_rounds)
            cpu_s, clock_s = time.process_time(), time.perf_counter()
            player.runner.launch(plan).wait()
            taken["cpu"].append((time.process_time() - cpu_s) * 1e6)
            taken["clock"].append((time.perf_counter() - clock_s) * 1e6)
        print(json.dumps({name: statistics.median(values) for name, values in taken.items()}), flush=True)


if __name__ == "__main__":
    main()
