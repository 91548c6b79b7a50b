"""Decode steps with LoRA adapters, as a part of the base model's speed.

    python benchmarks/adapters.py MODEL [--rank 16] [--num-threads 2] [--rounds 15] [--steps 20]

MODEL is a folder or a GGUF file. Random adapters of this rank on all linear layers are written to a temporary folder
and loaded as a server loads them. Steps of the base model, of one adapter and of eight adapters take turns, so that
other load affects all of them. A row is one case: the median milliseconds of a step, the median over the rounds of the
base model's time / its time, by the clock and by the process's CPU time, and the same of the fastest steps (of the 20th
part), which other load disturbs least.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.player import PAGE_SIZE, Player, capacity

if TYPE_CHECKING:
    from engine.models.spec.model_spec import ModelSpec

LENGTH: Final = 100
"""Tokens of a request before its first decode."""
NUM_ADAPTERS: Final = 8


class Case(NamedTuple):
    """Decodes of so many requests with so many adapters."""

    requests: int
    adapters: int


CASES: Final = (Case(1, 0), Case(1, 1), Case(16, 0), Case(16, 1), Case(16, 8))


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> None:
    """A random adapter on all linear layers, as peft writes it."""
    import torch
    from safetensors.torch import save_file

    from engine.models.adapters.base_modules import BaseModules

    generator = torch.Generator().manual_seed(seed)
    modules, tensors = BaseModules(spec), {}
    for name in modules.linears():
        _, outputs, inputs = modules.by_name[name]
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = (
                torch.randn(shape, generator=generator) * 0.02
            ).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Load the model and the adapters; time the cases in turn."""
    from engine.model_runner.adapters.adapter_store import SlotSizes
    from engine.model_runner.load import load_model_runner
    from engine.models.adapters.read_adapter import read_adapter
    from engine.models.load_spec import load_spec
    from engine.models.source import ModelSource
    from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig

    source = ModelSource("gguf" if options.model.is_file() else "hf", str(options.model), "benchmark")
    spec = load_spec(source)
    config = ModelConfig(dtype="bfloat16", device="cpu", num_threads=options.num_threads)
    runner = load_model_runner(
        EngineConfig(model=config, cache=CacheConfig(page_size=PAGE_SIZE)),
        source,
        spec,
        capacity(spec.vocab_size),
        adapter_slots=SlotSizes(NUM_ADAPTERS, options.rank),
    )
    assert runner.adapters is not None
    for number in range(1, NUM_ADAPTERS + 1):
        write_adapter(folder / str(number), spec, options.rank, number)
        started_s = time.perf_counter()
        adapter = read_adapter(folder / str(number), f"a{number}", spec, max_rank=options.rank)
        read_s = time.perf_counter()
        runner.adapters.store.read(number, adapter)
        if number == 1:
            print(f"header and hash {(read_s - started_s) * 1e3:.1f} ms, ", end="")
            print(f"read and packed {(time.perf_counter() - read_s) * 1e3:.1f} ms")
    player = Player(runner)
    tokens = random.Random(0)
    first_rows: dict[Case, int] = {}
    lengths = dict.fromkeys(CASES, LENGTH)
    for case in CASES:
        first_rows[case] = sum(earlier.requests for earlier in first_rows)
        prompts = [[tokens.randrange(3, 40_000) for _ in range(LENGTH)] for _ in range(case.requests)]
        slots = [n * case.adapters // case.requests + 1 if case.adapters else 0 for n in range(case.requests)]
        lens = [LENGTH] * case.requests
        plan = player.plan(lens, LENGTH, prompts, first_row=first_rows[case], adapters=slots)
        runner.launch(plan).wait()
    times: dict[Case, list[tuple[float, float]]] = defaultdict(list)
    steps_s: dict[Case, list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for case in CASES:
            started = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step_started_s = time.perf_counter()
                lengths[case] += 1
                plan = player.plan([lengths[case]] * case.requests, 1, None, first_row=first_rows[case])
                runner.launch(plan).wait()
                steps_s[case].append(time.perf_counter() - step_started_s)
            ended = time.perf_counter(), time.process_time()
            if number:  # the first one records
                times[case].append(
                    ((ended[0] - started[0]) / options.steps, (ended[1] - started[1]) / options.steps)
                )
    print("requests  adapters    step ms  of base, clock  CPU time   fastest ms  of base")
    for case in CASES:
        base = times[Case(case.requests, 0)]
        clock, cpu = (
            statistics.median(
                before[part] / after[part] for before, after in zip(base, times[case], strict=True)
            )
            for part in (0, 1)
        )
        step_ms = statistics.median(clock_s for clock_s, _ in times[case]) * 1e3
        fast, fast_base = (
            sorted(steps_s[one])[len(steps_s[one]) // 20] * 1e3 for one in (case, Case(case.requests, 0))
        )
        print(
            f"{case.requests:8d}  {case.adapters:8d}  {step_ms:9.2f}  {clock:14.3f}  {cpu:8.3f}  {fast:11.2f}  "
            f"{fast_base / fast:7.3f}"
        )


if __name__ == "__main__":
    main()
