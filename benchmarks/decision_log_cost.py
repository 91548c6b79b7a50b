"""The cost of `--decision-log`: time per step of the recorder alone, and bytes per step, by number of running requests.

    python benchmarks/decision_log_cost.py [--rounds 400] [--waiting 100] [--folder .]

A step is a decode of all running requests while others wait; its record, its result and the calls are written to a
file in the given folder, one write per pass. The time to replay the log is measured, too.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import numpy as np

from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.config.log_config import LogConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepResult
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.recorder import make_recorder
from engine.scheduler.journal.replay import replay
from engine.scheduler.scheduler import Scheduler

VOCAB_SIZE = 49_152


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="cost of the decision log")
    parser.add_argument("--rounds", type=int, default=400, help="steps per figure")
    parser.add_argument("--waiting", type=int, default=100, help="requests that wait during all steps")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()
    gc.disable()
    print(f"{'running':>8} {'recorder, us/step':>18} {'p90':>8} {'bytes/step':>11} {'replay, us/step':>16}")
    for num_running in (1, 64, 256, 1024):
        path = options.folder / f"decision_log_cost.{num_running}"
        path.unlink(missing_ok=True)
        samples, size = record_decodes(path, num_running, options.waiting, options.rounds)
        start = time.perf_counter()
        results = [replay(run) for run in read_runs(path)]
        replay_s = time.perf_counter() - start
        assert all(result.is_equal for result in results)
        path.unlink()
        print(
            f"{num_running:8} {np.median(samples) * 1e6:18.1f} {np.quantile(samples, 0.9) * 1e6:8.1f} "
            f"{size / options.rounds:11,.0f} {replay_s / results[0].num_steps * 1e6:16.1f}",
            flush=True,
        )


def record_decodes(path: Path, num_running: int, num_waiting: int, rounds: int) -> tuple[list[float], int]:
    """Seconds per step spent in the recorder, the writes included, and bytes written."""
    rng = np.random.default_rng(0)
    config = EngineConfig(
        scheduler=SchedulerConfig(chunked_prefill_size=8192, max_prefill_tokens=16384),
        log=LogConfig(decision_log=str(path)),
    )
    capacity = Capacity(4096, num_running * 64, 16, num_running, VOCAB_SIZE)
    eos = frozenset({2})
    scheduler = Scheduler(config.scheduler, CacheConfig(), capacity, eos)
    recorder = make_recorder(config, capacity, eos, scheduler, wall_s=0.0, now_s=0.0)
    for idx in range(num_running + num_waiting):
        ids = rng.integers(3, VOCAB_SIZE, 64 + idx % 16, dtype=np.int32).tobytes()
        sampling = SamplingParams(max_new_tokens=900, seed=1, ignore_eos=True)
        request = GenerateRequest(f"request-{idx:06d}", ids, sampling)
        recorder.received(request, 0.0)
        scheduler.handle(request, 0.0)
    samples: list[float] = []
    size = 0
    while len(samples) < rounds:
        decoding = scheduler.report(0.0).num_running_reqs == num_running
        size = size or (path.stat().st_size if decoding else 0)
        start = time.perf_counter()
        recorder.planning(0.0)
        spent = time.perf_counter() - start
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        start = time.perf_counter()
        recorder.planned(batch)
        spent += time.perf_counter() - start
        tokens = np.full(len(batch.sampled), 7, dtype=np.int32).tobytes()
        scheduler.settle(batch, StepResult(batch.plan.step_id, tokens), 0.0)
        start = time.perf_counter()
        recorder.settled()
        spent += time.perf_counter() - start
        scheduler.take_outputs()
        if decoding:
            samples.append(spent)
    recorder.close()
    return samples, path.stat().st_size - size


if __name__ == "__main__":
    main()
