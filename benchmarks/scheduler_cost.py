"""The cost of the scheduler: CPU time of planning and settling, without a model.

    python benchmarks/scheduler_cost.py [--rounds 200] [--folder FOLDER]

Prints one table: a decode step by number of running requests, an admission pass with many waiting, a look-up of a long
prompt in a large prefix cache, insertion and eviction by pages touched, and what `--decision-log` adds to a decode step
while 100 requests wait, its writes to a file in the folder included. Medians; time of this thread only.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.config.server_config import LogConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepResult
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.recorder import make_recorder
from engine.scheduler.journal.replay import replay
from engine.scheduler.prefix_cache.base import PrefixMatch
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from engine.scheduler.scheduler import Scheduler

VOCAB_SIZE = 49_152
T = TypeVar("T")


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description="CPU cost of the scheduler alone")
    parser.add_argument("--rounds", type=int, default=200, help="steps per figure")
    parser.add_argument("--folder", type=Path, help="where the decision log is written (a temporary folder)")
    options = parser.parse_args()
    rounds: int = options.rounds
    gc.collect()
    gc.freeze()
    gc.disable()
    print(f"{'what':58} {'median':>10} {'p90':>10}")
    for num_running in (1, 10, 64, 256, 1024):
        plan, settle, total = decode_step(num_running, rounds)
        show(f"decode step, {num_running} running: plan", plan)
        show(f"decode step, {num_running} running: settle", settle)
        show(f"decode step, {num_running} running: plan + settle", total)
        print(f"{'    per generated token':58} {np.median(total) / num_running * 1e6:9.2f} us")
    for num_waiting in (0, 100, 10_000):
        show(
            f"plan, 64 running, memory full, {num_waiting} waiting (fcfs)",
            admission_pass(num_waiting, rounds),
        )
    show("admit one 1,024-token request, 10,000 waiting", admit_one(rounds))
    for page_size in (1, 16):
        match, insert, evict = prefix_cache(page_size, rounds)
        show(f"match 32k of 1 M cached tokens, page size {page_size}", match)
        show(f"insert 32k tokens, page size {page_size}", insert)
        show(f"evict 32k tokens, page size {page_size}", evict)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for num_running in (1, 64, 256, 1024):
            path = Path(folder) / f"{num_running}.log"
            samples, num_bytes = decision_log(path, num_running, rounds)
            show(f"decision log, {num_running} running: recorder", samples)
            started_s = time.thread_time()
            results = [replay(run) for run in read_runs(path)]
            replay_us = (time.thread_time() - started_s) / results[0].num_steps * 1e6
            assert all(result.is_equal for result in results)
            print(f"{'    per step':58} {num_bytes:,.0f} bytes, replay {replay_us:.1f} us")


def show(what: str, samples: list[float]) -> None:
    """One line."""
    print(
        f"{what:58} {np.median(samples) * 1e3:7.3f} ms {np.quantile(samples, 0.9) * 1e3:7.3f} ms", flush=True
    )


def timed(function: Callable[[], T], into: list[float]) -> T:
    """Call a function and record the CPU time of this thread."""
    start = time.thread_time()
    result = function()
    into.append(time.thread_time() - start)
    return result


def make(num_rows: int, num_pages: int, page_size: int = 16, max_model_len: int = 4096) -> Scheduler:
    """A scheduler with enough capacity for all measurements."""
    config = SchedulerConfig(chunked_prefill_size=8192, max_prefill_tokens=16384)
    capacity = Capacity(max_model_len, num_pages, page_size, num_rows, VOCAB_SIZE)
    return Scheduler(config, CacheConfig(), capacity, frozenset({2}))


def submit(
    scheduler: Scheduler, rid: str, prompt_len: int, max_new_tokens: int, rng: np.random.Generator
) -> None:
    """Send a random prompt."""
    ids = rng.integers(3, VOCAB_SIZE, prompt_len, dtype=np.int32).tobytes()
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=1, ignore_eos=True)
    scheduler.handle(GenerateRequest(rid, ids, sampling), 0.0)


def result_of(batch: ScheduleBatch) -> StepResult:
    """A result with tokens that end no request."""
    return StepResult(batch.plan.step_id, np.full(len(batch.sampled), 7, dtype=np.int32).tobytes())


def step(scheduler: Scheduler) -> ScheduleBatch | None:
    """One step without timing."""
    batch = scheduler.next_batch(0.0)
    if batch is not None:
        scheduler.settle(batch, result_of(batch), 0.0)
        scheduler.take_outputs()
    return batch


def decode_step(num_running: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Planning and settling when all requests decode and none waits."""
    rng = np.random.default_rng(0)
    scheduler = make(num_running, num_pages=num_running * 64)
    for idx in range(num_running):
        submit(scheduler, f"request-{idx:06d}", 64 + idx % 16, 600, rng)
    while scheduler.report(0.0).num_queue_reqs:
        step(scheduler)
    step(scheduler)
    plan: list[float] = []
    settle: list[float] = []
    for _ in range(min(rounds, 400)):
        batch = timed(partial(scheduler.next_batch, 0.0), plan)
        assert batch is not None and len(batch) == num_running
        result = result_of(batch)
        timed(partial(scheduler.settle, batch, result, 0.0), settle)
        scheduler.take_outputs()
    return plan, settle, [one + other for one, other in zip(plan, settle, strict=True)]


def admission_pass(num_waiting: int, rounds: int) -> list[float]:
    """Planning when 64 requests run, memory is fully reserved, and many requests wait."""
    rng = np.random.default_rng(0)
    scheduler = make(1024, num_pages=64 * 78, max_model_len=8192)
    for idx in range(64):
        submit(scheduler, f"running-{idx:06d}", 512, 700, rng)
    while scheduler.report(0.0).num_queue_reqs:
        step(scheduler)
    step(scheduler)
    for idx in range(num_waiting):
        submit(scheduler, f"waiting-{idx:06d}", 1024, 4000, rng)
    samples: list[float] = []
    for _ in range(rounds):
        batch = timed(partial(scheduler.next_batch, 0.0), samples)
        assert batch is not None and batch.num_extends == 0
        scheduler.settle(batch, result_of(batch), 0.0)
    return samples


def admit_one(rounds: int) -> list[float]:
    """Planning a step that admits one of many requests, while 64 decode."""
    rng = np.random.default_rng(0)
    config = SchedulerConfig(chunked_prefill_size=8192, max_prefill_tokens=1024 + 64)
    capacity = Capacity(8192, 1_000_000, 16, 8192, VOCAB_SIZE)
    scheduler = Scheduler(config, CacheConfig(), capacity, frozenset({2}))
    for idx in range(64):
        submit(scheduler, f"running-{idx:06d}", 16, 4000, rng)
    step(scheduler)
    for idx in range(10_000):
        submit(scheduler, f"waiting-{idx:06d}", 1024, 1, rng)
    samples: list[float] = []
    for _ in range(rounds):
        batch = timed(partial(scheduler.next_batch, 0.0), samples)
        assert batch is not None and 1 <= batch.num_extends <= 2
        scheduler.settle(batch, result_of(batch), 0.0)
    return samples


def prefix_cache(page_size: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """A tree of 1 M tokens in 32 conversations of 32k that share their first 1k tokens and were computed in chunks."""
    rng = np.random.default_rng(0)
    length, chunk = 32_768, 4096
    cache = RadixCache(page_size)
    shared = rng.integers(0, VOCAB_SIZE, 1024, dtype=np.int32)
    prompts = [
        np.concatenate([shared, rng.integers(0, VOCAB_SIZE, length - 1024, dtype=np.int32)]).tobytes()
        for _ in range(33)
    ]
    next_page = 1

    def insert(prompt: bytes) -> None:
        nonlocal next_page
        lease = cache.lock("", PrefixMatch())
        for start in range(0, length, chunk):
            pages = np.arange(next_page, next_page + chunk // page_size, dtype=np.int32)
            next_page += len(pages)
            cache.extend(lease, prompt[start * 4 : (start + chunk) * 4], pages)
        cache.release(lease)

    for prompt in prompts[:32]:
        insert(prompt)
    matches: list[float] = []
    inserts: list[float] = []
    evictions: list[float] = []
    for k in range(rounds):
        prompt = prompts[k % 32]
        found = timed(partial(cache.match, "", prompt + prompt[:4], length // page_size), matches)
        assert found.num_pages == length // page_size
    for _ in range(max(rounds // 10, 5)):
        timed(partial(insert, prompts[32]), inserts)
        timed(partial(cache.evict, length // page_size), evictions)
    return matches, inserts, evictions


def decision_log(
    path: Path, num_running: int, rounds: int, num_waiting: int = 100
) -> tuple[list[float], float]:
    """Time of the recorder in each decode step, and bytes per step."""
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
        request = GenerateRequest(
            f"request-{idx:06d}", ids, SamplingParams(max_new_tokens=900, seed=1, ignore_eos=True)
        )
        recorder.received(request, 0.0)
        scheduler.handle(request, 0.0)
    samples: list[float] = []
    first_byte = 0
    while len(samples) < rounds:
        decoding = scheduler.report(0.0).num_running_reqs == num_running
        first_byte = first_byte or (path.stat().st_size if decoding else 0)
        spent: list[float] = []
        timed(partial(recorder.planning, 0.0), spent)
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        timed(partial(recorder.planned, batch), spent)
        scheduler.settle(batch, result_of(batch), 0.0)
        timed(recorder.settled, spent)
        scheduler.take_outputs()
        if decoding:
            samples.append(sum(spent))
    recorder.close()
    return samples, (path.stat().st_size - first_byte) / rounds


if __name__ == "__main__":
    main()
