"""Properties of the whole scheduler under random arrivals, aborts, flushes, failures and tiny pools.

The FakeRunner checks in each step that no slot is written twice and that every token read from KV memory is the right
one; the harness checks after each step the books page by page, the locks and the verdicts, and at the end every answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.runtime.messages import FinishKind, HintAction, PauseMode
from engine.runtime.pooling import PoolingKind, PoolingParams
from tests.feasible import fits
from tests.selection import examples

from .harness import VOCAB_SIZE, Harness

BASE = [1 + (k * k + 3 * k) % (VOCAB_SIZE - 1) for k in range(80)]

HOSTS = st.sampled_from(
    [
        ({}, 0.0),
        ({"num_host_pages": 3}, 1.0),
        ({"num_host_pages": 40, "preemption_mode": "swap"}, 1.0),
        ({"num_host_pages": 40, "kv_token_bytes": 1 << 30}, 1.0),  # a step copies few of them
    ]
)
"""Host memory and `--kv-host-size`."""


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen at any time."""

    harness: Harness

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(3, 40),
        max_running_requests=st.integers(1, 6),
        radix_cache=st.booleans(),
        overlap=st.sampled_from([0, 0, 1, 2]),
        phases=st.sampled_from(["mixed", "prefill-first"]),
        schedule_policy=st.sampled_from(["fcfs", "lpm"]),
        chunked_prefill_size=st.sampled_from([-1, 1, 8, 24]),
        max_prefill_tokens=st.sampled_from([5, 32, 200]),
        target_step_ms=st.sampled_from([0.0, 0.1, 15.0]),
        max_prefill_steps_in_a_row=st.integers(1, 3),
        schedule_conservativeness=st.sampled_from([0.01, 0.3, 1.0]),
        multi_step_ms=st.sampled_from([0.0, 25.0, 1e9]),
        max_loras_per_batch=st.sampled_from([1, 2, 8]),
        cache=st.sampled_from([{}, {"pin_fraction": 0.5}]),
        host=HOSTS,
        news=st.randoms(use_true_random=False),
    )
    def make(
        self,
        overlap: int,
        multi_step_ms: float,
        news: random.Random,
        cache: dict[str, Any] | None = None,
        host: tuple[dict[str, Any], float] = ({}, 0.0),
        **config: Any,
    ) -> None:
        burst_ms = 0.0 if overlap else multi_step_ms
        memory, kv_host_size = host
        cache = {**(cache or {}), "kv_host_size": kv_host_size if config.get("radix_cache", True) else 0.0}
        self.harness = Harness(
            max_model_len=120, overlap=overlap, multi_step_ms=burst_ms, cache=cache, **memory, **config
        )
        self.harness.has_news = lambda: news.random() < 0.2

    @rule(
        shared=st.integers(0, 80),
        own=st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=10),
        max_new_tokens=st.integers(1, 40),
        min_new_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
        extra_key=st.sampled_from(["", "", "salt"]),
        adapter=st.sampled_from([{}, {}, {"lora_id": "a"}, {"lora_id": "b"}, {"lora_id": "c"}]),
        turn=st.sampled_from(
            [{}, {"session": "s"}, {"session": "t", "tenant": "a"}, {"session": "t", "keep_s": 2.0}]
        ),
        logprobs=st.sampled_from([None, None, None, 0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        prompt_logprobs_start=st.sampled_from([0, 0, 9, 40]),
        stop_token_ids=st.sampled_from([(), (), (3, 5)]),
        background=st.sampled_from([False, False, True]),
    )
    def submit(
        self,
        shared: int,
        own: list[int],
        min_new_tokens: int,
        max_new_tokens: int,
        adapter: dict[str, str],
        turn: dict[str, Any],
        background: bool = False,
        **options: Any,
    ) -> None:
        prompt = BASE[:shared] + own or [1]
        rid = self.harness.submit(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(min_new_tokens, max_new_tokens),
            message=adapter | turn | {"background": background},
            **options,
        )
        refused = self.harness.answers[rid].finish is not None
        assert refused == (not fits(len(prompt), max_new_tokens, self.harness.capacity))

    @rule(
        shared=st.integers(0, 80),
        own=st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=10),
        all_tokens=st.booleans(),
    )
    def submit_pooling(self, shared: int, own: list[int], *, all_tokens: bool) -> None:
        prompt = BASE[:shared] + own or [1]
        rid = self.harness.submit(prompt=prompt, pooling=PoolingParams(all_tokens=all_tokens))
        refused = self.harness.answers[rid].finish is not None
        assert refused == (len(prompt) > self.harness.capacity.max_total_tokens)

    @rule(
        shared=st.integers(1, 80),
        owns=st.lists(
            st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=9), min_size=2, max_size=5
        ),
    )
    def submit_questions(self, shared: int, owns: list[list[int]]) -> None:
        """The prompts of one call for probabilities of labels."""
        pooling = PoolingParams(PoolingKind.LABELS, label_ids=(5, 6), shared_len=shared)
        for own in owns:
            self.harness.submit(prompt=BASE[:shared] + own, pooling=pooling)

    @rule(which=st.integers(0, 60))
    def abort(self, which: int) -> None:
        rid = f"r{which}"
        answer = self.harness.answers.get(rid)
        was_live = answer is not None and answer.finish is None
        self.harness.abort(rid)
        if was_live:
            assert answer is not None and answer.finish is not None and answer.finish.kind is FinishKind.ABORT

    @rule(
        session=st.sampled_from("st"), action=st.sampled_from(HintAction), ttl_s=st.sampled_from([0.5, 30.0])
    )
    def hint(self, session: str, action: HintAction, ttl_s: float) -> None:
        """A session is closed while its turns run, demoted, kept, or opened; it costs no memory."""
        before = self.harness.pages()
        self.harness.hint(session, action, ttl_s)
        assert self.harness.pages() == before

    @rule(which=st.integers(0, 60))
    def fail(self, which: int) -> None:
        self.harness.runner.fail_next.add(f"r{which}")

    @rule(fingerprint=st.sampled_from("abc"))
    def unload(self, fingerprint: str) -> None:
        """Its requests end with an error, in whatever state; a later request loads it again."""
        if fingerprint in self.harness.store_ids:
            self.harness.unload_adapter(fingerprint)

    @rule()
    def flush(self) -> None:
        before = self.harness.pages()
        done = self.harness.flush()
        assert done.flushed_tokens + done.kept_tokens == before.cached * self.harness.capacity.page_size
        assert self.harness.pages().cached * self.harness.capacity.page_size == done.kept_tokens

    @rule(
        mode=st.sampled_from(PauseMode),
        prompt=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=9),
    )
    def pause(self, mode: PauseMode, prompt: list[int]) -> None:
        """Nothing is computed in a pause, and answers are those of a life without one."""
        self.harness.pause(mode)
        rid = self.harness.submit(prompt=prompt, max_new_tokens=2)
        running = self.harness.scheduler.report(0.0).num_running_reqs
        assert running == 0 or mode is PauseMode.KEEP
        if mode is not PauseMode.WAIT:
            assert self.harness.step() is None
        assert not self.harness.answers[rid].rows or not fits(len(prompt), 2, self.harness.capacity)
        self.harness.resume()

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule()
    def settle_early(self) -> None:
        if self.harness.in_flight:
            self.harness.settle()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run_until_idle()
            assert self.harness.pages().held == 0
            assert not len(self.harness.scheduler._parts.memory.kv.label_groups)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("phases", ["mixed", "prefill-first"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("page_size", "radix_cache"), [(1, True), (4, True), (4, False), (16, True)])
def test_every_answer_is_the_one_it_gets_alone(
    make_scheduler: Callable[..., Harness], phases: str, overlap: int, page_size: int, radix_cache: bool
) -> None:
    num_retracted = 0
    for seed, (policy, chunk) in enumerate(itertools.product(("fcfs", "lpm"), (-1, 8))):
        rng = random.Random(seed)
        harness = make_scheduler(
            page_size=page_size,
            num_pages=96 // page_size,
            max_model_len=96,
            max_running_requests=rng.choice([5, 8]),
            radix_cache=radix_cache,
            overlap=overlap,
            phases=phases,
            schedule_policy=policy,
            chunked_prefill_size=chunk,
            max_prefill_tokens=rng.choice([16, 100]),
            schedule_conservativeness=0.01,
        )
        for idx in range(16):
            prompt = BASE[: rng.randrange(20)] + [
                rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))
            ]
            harness.submit(prompt=prompt, max_new_tokens=rng.randrange(1, 60), ignore_eos=False)
            if idx % 2:
                harness.step()
        harness.run_until_idle()
        num_retracted += harness.scheduler.report(0.0).totals.retracted_reqs
    assert num_retracted, "the pool was never short: the test does not test what it should"
