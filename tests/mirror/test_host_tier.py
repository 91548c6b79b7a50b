"""The scheduler's host tier with the product's runner: evicted pages come back from host memory with their KV.

On torch tensors of the CPU, and on the mirror, on which copies happen as late as a GPU may make them.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import FinishKind, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import Pending
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.scheduler import Scheduler
from tests.model_runner.conftest import Driver

from .mirror import mirror_device
from .runners import LLAMA, ROWS, load_driver, on_cpu

NUM_HOST_PAGES = 60
PAGE = 4
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_new_tokens=6, seed=1, ignore_eos=True),
    SamplingParams(temperature=0.9, max_new_tokens=9, seed=5, ignore_eos=True),
)


def serve(
    driver: Driver, *, num_pages: int, kv_host_size: float, preemption_mode: str
) -> tuple[list[list[int]], int]:
    """The answers of five conversations with four turns each, and the tokens that came from the host."""
    capacity = Capacity(
        128, num_pages, PAGE, ROWS, LLAMA.vocab_size, num_host_pages=NUM_HOST_PAGES, kv_token_bytes=1
    )
    config = SchedulerConfig(
        chunked_prefill_size=16,
        overlap=True,
        preemption_mode=preemption_mode,  # type: ignore[arg-type]
        schedule_conservativeness=0.01,
        admission_estimator="none",
    )
    scheduler = Scheduler(
        config, CacheConfig(page_size=PAGE, kv_host_size=kv_host_size), capacity, frozenset({2})
    )
    rng = random.Random(3)
    now_s = 0.0
    answers: dict[str, list[int]] = {}
    chats = [[rng.randrange(3, 96) for _ in range(rng.randrange(5, 17))] for _ in range(5)]
    in_flight: list[tuple[ScheduleBatch, Pending]] = []
    for turn in range(4):
        for number, chat in enumerate(chats):
            answers[rid := f"{turn}.{number}"] = []
            ids = np.array(chat, dtype=np.int32).tobytes()
            scheduler.handle(GenerateRequest(rid, ids, SAMPLINGS[number % 2]), now_s)
        while scheduler.num_unfinished or in_flight:
            now_s += 0.01
            batch = scheduler.next_batch(now_s)
            if batch is not None:
                in_flight.append((batch, driver.runner.launch(batch.plan)))
            while in_flight and (len(in_flight) > 1 or batch is None):
                oldest, pending = in_flight.pop(0)
                scheduler.settle(oldest, pending.wait(), now_s)
            for output in scheduler.take_outputs():
                for row in output.outputs:
                    assert row.finish is None or row.finish.kind is FinishKind.LENGTH, row.finish
                    answers[row.rid] += np.frombuffer(row.token_ids, dtype=np.int32).tolist()
            scheduler.audit()
        for number, chat in enumerate(chats):
            chat += answers[f"{turn}.{number}"] + [rng.randrange(3, 96)]
    while (batch := scheduler.next_batch(now_s)) is not None:
        scheduler.settle(batch, driver.runner.launch(batch.plan).wait(), now_s)
    scheduler.on_idle()
    report = scheduler.report(now_s)
    assert (report.totals.swapped_in_tokens > 0) == (preemption_mode == "swap")
    figures = report.tiers.get("host")
    return list(answers.values()), figures.loaded_tokens if figures else 0


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By a pool in which everything has room."""
    with on_cpu():
        driver = load_driver(LLAMA, None, num_host_pages=NUM_HOST_PAGES)
        return serve(driver, num_pages=64, kv_host_size=0.0, preemption_mode="recompute")[0]


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_on_cpu_tensors_answers_are_those_of_a_large_pool(
    preemption_mode: str, expected: list[list[int]]
) -> None:
    with on_cpu():
        driver = load_driver(LLAMA, None, num_host_pages=NUM_HOST_PAGES)
        found, num_loaded = serve(driver, num_pages=20, kv_host_size=1.0, preemption_mode=preemption_mode)
        assert found == expected
        assert num_loaded > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_with_late_copies_of_a_gpu_answers_are_those_of_a_large_pool(
    preemption_mode: str, expected: list[list[int]]
) -> None:
    with mirror_device(triton=False) as mirror:
        driver = load_driver(LLAMA, mirror, num_host_pages=NUM_HOST_PAGES)
        found, num_loaded = serve(driver, num_pages=20, kv_host_size=1.0, preemption_mode=preemption_mode)
        mirror.check()
    assert found == expected
    assert num_loaded > 100
