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
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from engine.model_runner.model_runner import ModelRunner
    from engine.models.spec.model_spec import ModelSpec
    from engine.runtime.step_plan import StepPlan

PAGE_SIZE: Final = 16
MAX_LEN: Final = 2048
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
    from engine.model_runner.adapters.adapter_slots import SlotSizes
    from engine.model_runner.load import load_model_runner
    from engine.models.adapters.read_adapter import read_adapter
    from engine.models.load_spec import load_spec
    from engine.models.source import ModelSource
    from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig
    from engine.runtime.feasibility import Capacity

    source = ModelSource("gguf" if options.model.is_file() else "hf", str(options.model), "benchmark")
    spec = load_spec(source)
    num_rows = sum(case.requests for case in CASES)
    capacity = Capacity(MAX_LEN, num_rows * MAX_LEN // PAGE_SIZE, PAGE_SIZE, num_rows, spec.vocab_size, 0)
    config = ModelConfig(dtype="bfloat16", device="cpu", num_threads=options.num_threads)
    runner = load_model_runner(
        EngineConfig(model=config, cache=CacheConfig(page_size=PAGE_SIZE)),
        source,
        spec,
        capacity,
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
    first_row = 0
    starts = {}
    for case in CASES:
        starts[case] = first_row
        player.start(case, first_row)
        first_row += case.requests
    times: dict[Case, list[tuple[float, float]]] = defaultdict(list)
    steps_s: dict[Case, list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for case in CASES:
            started = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step_started_s = time.perf_counter()
                player.step(case, starts[case])
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


class Player:
    """Plays the scheduler: requests of random tokens, pages in sequence."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step_id = 0
        self.lens: dict[int, int] = {}

    def start(self, case: Case, first_row: int) -> None:
        """Load the case's adapters and compute its prompts."""
        import numpy as np

        for row in range(first_row, first_row + case.requests):
            slot = (row - first_row) * case.adapters // case.requests + 1 if case.adapters else 0
            loads = np.array([[slot, slot]], dtype=np.int32).tobytes() if slot else b""
            tokens = np.random.default_rng(row).integers(3, 40000, LENGTH).astype(np.int32).tobytes()
            self.lens[row] = LENGTH
            self.runner.launch(self.plan([row], LENGTH, tokens, slot, loads)).wait()

    def step(self, case: Case, first_row: int) -> None:
        """One decode of all requests of the case."""
        rows = list(range(first_row, first_row + case.requests))
        for row in rows:
            self.lens[row] += 1
        self.runner.launch(self.plan(rows, 1)).wait()

    def plan(
        self, rows: list[int], new: int, tokens: bytes = b"", slot: int = 0, loads: bytes = b""
    ) -> StepPlan:
        """The plan that computes the last `new` tokens of some rows."""
        import numpy as np

        from engine.runtime.sampling_params import SamplingParams
        from engine.runtime.step_plan import ForwardMode, NewReq, StepPlan

        def int32(values: Any) -> bytes:
            return np.asarray(values, dtype=np.int32).tobytes()

        self.step_id += 1
        lens = [self.lens[row] for row in rows]
        places = [
            np.arange(length - new, length) + row * MAX_LEN + PAGE_SIZE
            for row, length in zip(rows, lens, strict=True)
        ]
        sampling = SamplingParams(temperature=0.0, seed=0, max_new_tokens=MAX_LEN, ignore_eos=True)
        return StepPlan(
            step_id=self.step_id,
            mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
            rows=int32(rows),
            num_computed_tokens=int32([length - new for length in lens]),
            num_scheduled_tokens=int32([new] * len(rows)),
            out_cache_loc=int32(np.concatenate(places)),
            samples=bytes([1] * len(rows)),
            total_num_scheduled_tokens=new * len(rows),
            new_reqs=(NewReq(f"r{rows[0]}", rows[0], tokens, new, b"", sampling, adapter_slot=slot),)
            if tokens
            else (),
            adapter_loads=loads,
        )


if __name__ == "__main__":
    main()
