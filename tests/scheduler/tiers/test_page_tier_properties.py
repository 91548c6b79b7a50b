"""A scheduler with a disk tier that answers late, never, short, twice, out of order, after an abort, with an error.

The machine adds the disk to `SchedulerMachine`: the runner checks that each token read from KV memory is right, the
harness checks the page equation after each call, and the log of everything that happened replays exactly.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.runtime.transport.kv_tiers import Forgotten, Found, Loaded, Stored
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.tiers import page_tier
from tests.selection import examples

from ..harness import VOCAB_SIZE
from ..journal.recorded import finish, record
from ..test_scheduler_properties import BASE, HOSTS, SchedulerMachine
from .fake_disk import DiskHarness, FakeDisk


class DiskMachine(SchedulerMachine):
    """Anything may happen at any time."""

    harness: DiskHarness

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(3, 40),
        max_running_requests=st.integers(1, 6),
        overlap=st.sampled_from([0, 0, 1, 2]),
        schedule_policy=st.sampled_from(["fcfs", "lpm", "priority", "fair"]),
        chunked_prefill_size=st.sampled_from([-1, 8, 24]),
        max_prefill_tokens=st.sampled_from([5, 32, 200]),
        schedule_conservativeness=st.sampled_from([0.01, 1.0]),
        multi_step_ms=st.sampled_from([0.0, 25.0]),
        max_loras_per_batch=st.sampled_from([1, 8]),
        checkpoints=st.sampled_from([(0, 0), (0, 0), (1, 1), (2, 5), (9, 1), (40, 2)]),
        min_tokens=st.sampled_from([1, 4, 16]),
        estimate_s=st.sampled_from([0.0, 0.001, 20.0]),
        answers_itself=st.booleans(),
        kv_write=st.sampled_from(["selective", "through", "evicted"]),
        kv_fetch=st.sampled_from(["timeout", "timeout", "timeout:700", "best_effort", "wait"]),
        host=HOSTS,
        news=st.randoms(use_true_random=False),
    )
    def make(
        self,
        overlap: int,
        multi_step_ms: float,
        news: random.Random,
        min_tokens: int = 4,
        checkpoints: tuple[int, int] = (0, 0),
        estimate_s: float = 0.0,
        answers_itself: bool = False,
        kv_write: str = "through",
        kv_fetch: str = "timeout",
        host: tuple[dict[str, Any], float] = ({}, 0.0),
        **config: Any,
    ) -> None:
        memory, kv_host_size = ({}, 0.0) if checkpoints[1] else host
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(page_tier, "MIN_TOKENS", min_tokens)
        self.folder = tempfile.TemporaryDirectory()
        burst_ms = 0.0 if overlap else multi_step_ms
        num_stages = 3 if overlap == 2 else 1
        self.harness = self.new_harness(
            max_model_len=120,
            overlap=overlap,
            num_stages=num_stages,
            multi_step_ms=burst_ms,
            num_checkpoints=checkpoints[0],
            checkpoint_pages=checkpoints[1],
            cache={
                "kv_disk": "folder",
                "kv_write": kv_write,
                "kv_fetch": kv_fetch,
                "kv_host_size": kv_host_size,
            },
            **memory,
            **config,
        )
        self.harness.has_news = lambda: news.random() < 0.2
        self.harness.disk.answers_itself = answers_itself
        self.harness.disk.estimate_s = estimate_s

    def new_harness(self, **config: Any) -> DiskHarness:
        harness = record(Path(self.folder.name) / "log", kind=DiskHarness, **config)
        assert isinstance(harness, DiskHarness)
        return harness

    @rule(which=st.integers(0, 20), most=st.sampled_from([None, None, None, 0, 1, 3]), fails=st.booleans())
    def answer(self, which: int, most: int | None, *, fails: bool) -> None:
        if self.harness.disk.open:
            self.harness.answer(
                index=which, most=most, error="read error" if fails and most is not None else ""
            )

    @rule(which=st.integers(0, 60))
    def say_again(self, which: int) -> None:
        disk = self.harness.disk
        if disk.answered:
            self.harness.tell(disk.answered[which % len(disk.answered)])

    @rule(kind=st.sampled_from([Found, Loaded, Stored]), job=st.integers(1, 60), num_pages=st.integers(0, 9))
    def lie_about_a_job_that_is_not_open(self, kind: Any, job: int, num_pages: int) -> None:
        if all(each.job != job for each in self.harness.disk.open):
            self.harness.tell(kind(job, num_pages))
            self.harness.tell(Forgotten(job))

    @rule()
    def write_late(self) -> None:
        self.harness.disk.scribble(self.harness.runner)

    @rule(seconds=st.sampled_from([0.5, 2.5, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.harness.now_s += seconds

    @rule()
    def answer_by_itself(self) -> None:
        self.harness.disk.answers_itself = not self.harness.disk.answers_itself

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        try:
            self.end()
        finally:
            self.patch.undo()
            self.folder.cleanup()

    def end(self) -> None:
        harness, disk = self.harness, self.harness.disk
        disk.answers_itself = False
        for _ in range(2):  # to be found, or to be loaded
            harness.now_s += 100.0
            harness.step()
            while harness.in_flight:
                harness.settle()
        assert not harness.scheduler._parts.requests.receiving, (
            "a request waits for a disk that never answers"
        )
        disk.answers_itself = True
        super().teardown()
        while harness.deliver():
            harness.run_until_idle()
        harness.scheduler.on_idle()
        assert not harness.scheduler._parts.transfer.num_open
        assert not harness.scheduler._parts.ledger._incoming.will_give_back
        finish(harness)
        (result,) = [replay(run) for run in read_runs(Path(self.folder.name) / "log")]
        assert result.is_equal, result


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    max_examples=examples(120), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("page_size", "restarts"), [(1, 1), (4, 0), (4, 3), (16, 2)])
def test_prompts_through_a_small_tree_and_a_disk_get_the_tokens_that_they_get_alone(
    monkeypatch: pytest.MonkeyPatch, page_size: int, restarts: int, overlap: int
) -> None:
    """The harness compares each answer with that of the request alone."""
    monkeypatch.setattr(page_tier, "MIN_TOKENS", 8)
    rng, disk = random.Random(page_size), FakeDisk(page_size)
    num_loaded = 0
    for _ in range(1 + restarts):
        harness = DiskHarness(
            disk=disk,
            cache={"kv_write": "through"},
            page_size=page_size,
            num_pages=160 // page_size,
            max_model_len=96,
            max_running_requests=4,
            overlap=overlap,
            chunked_prefill_size=16,
            schedule_conservativeness=0.01,
        )
        disk.open.clear()
        prompts = [
            BASE[: rng.randrange(50)] + [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
            for _ in range(10)
        ]
        for prompt in prompts * 3:
            harness.submit(prompt=prompt, max_new_tokens=rng.randrange(1, 16), ignore_eos=False)
            for _ in range(rng.randrange(6)):
                harness.step()
        harness.run_until_idle()
        figures = harness.scheduler.report(0.0).tiers["disk"]
        assert figures is not None
        num_loaded += figures.loaded_tokens
    assert num_loaded, "nothing was loaded: the test does not test what it should"
