"""Checkpoints of state layers: where they are taken, who owns their slots, and that no request starts from a wrong one.

The FakeRunner checks each start and each step: a row's state is exact at one position only.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from engine.runtime.pooling import PoolingKind, PoolingParams
from engine.scheduler.memory.pages import LedgerError
from engine.scheduler.records.verdict import MissKind
from engine.scheduler.speculation.ngram_proposer import NgramProposer
from tests.scheduler.grammar.toy_matcher import ToyGrammar
from tests.scheduler.harness import Harness
from tests.scheduler.test_scheduler_properties import SchedulerMachine
from tests.selection import examples


@pytest.fixture
def make_harness() -> Any:
    def make(*, num_checkpoints: int = 16, checkpoint_pages: int = 4, **options: Any) -> Harness:
        return Harness(num_checkpoints=num_checkpoints, checkpoint_pages=checkpoint_pages, **options)

    return make


def cached(harness: Harness, rid: str) -> int:
    """Tokens of the prompt that a request did not compute."""
    return harness.answers[rid].rows[-1].usage.cached_tokens


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1, 97) for _ in range(length)]


def test_an_equal_prompt_starts_at_the_last_page_border_before_its_end(make_harness):
    harness = make_harness()
    for length, expected in ((21, 20), (20, 16), (4, 0), (5, 4)):
        prompt = prompt_of(length, seed=length)
        harness.submit(prompt=prompt)
        harness.run_until_idle()
        rid = harness.submit(prompt=prompt)
        harness.run_until_idle()
        assert cached(harness, rid) == expected


def test_the_next_turn_starts_within_the_answer(make_harness):
    harness = make_harness(checkpoint_pages=2)
    first = harness.submit(prompt=prompt_of(10), max_new_tokens=30)
    harness.run_until_idle()
    prompt = [*harness.answers[first].prompt, *harness.answers[first].tokens, *prompt_of(6, seed=1)]
    second = harness.submit(prompt=prompt)
    harness.run_until_idle()
    assert cached(harness, second) == 32  # 39 tokens have KV, and every second page of 4 has a state


def test_a_prefix_that_prompts_share_gets_a_checkpoint_where_they_part(make_harness):
    harness = make_harness(checkpoint_pages=100)
    system = prompt_of(24)
    counts = []
    for seed in range(3):
        rid = harness.submit(prompt=system + prompt_of(20, seed=seed + 1))
        harness.run_until_idle()
        counts.append(cached(harness, rid))
    assert counts == [0, 0, 24]


def test_questions_about_an_input_start_where_they_part(make_harness):
    """The first one takes a checkpoint there, though nothing like it was computed before."""
    harness = make_harness(checkpoint_pages=100, chunked_prefill_size=256)
    system, counts = prompt_of(50), {}
    for shared_len in (0, 50):
        pooling = PoolingParams(PoolingKind.LABELS, label_ids=(5, 6), shared_len=shared_len)
        prompts = [[1 + shared_len, *system[1:], *prompt_of(20, seed=seed)] for seed in range(1, 4)]
        rids = [harness.submit(prompt=prompt, pooling=pooling) for prompt in prompts]
        harness.run_until_idle()
        counts[shared_len] = [cached(harness, rid) for rid in rids]
    assert counts == {0: [0, 0, 48], 50: [0, 48, 48]}


def test_a_miss_without_a_state_says_so(make_harness):
    harness = make_harness(checkpoint_pages=100)
    system = prompt_of(24)
    for seed in range(2):
        harness.submit(prompt=system + prompt_of(20, seed=seed + 1))
        harness.run_until_idle()
    (miss,) = [miss for each in harness.scheduler.decisions.passes for miss in each.cache_misses][-1:]
    assert (miss.kind, miss.prefix_len) == (MissKind.NO_STATE, 0)
    assert "state" in miss.kind.text


def test_chunks_of_equal_prompts_are_computed_once(make_harness):
    harness = make_harness(chunked_prefill_size=16, num_pages=128)
    prompt = prompt_of(70)
    rids = [harness.submit(prompt=prompt) for _ in range(3)]
    harness.run_until_idle()
    assert [cached(harness, rid) for rid in rids[1:]] != [0, 0]
    assert harness.scheduler.report(harness.now_s).totals.prompt_tokens == 210


def test_the_oldest_checkpoint_goes_first(make_harness):
    harness = make_harness(num_checkpoints=2, checkpoint_pages=100)
    prompts = [prompt_of(9, seed=seed) for seed in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        harness.submit(prompt=prompt)
        harness.run_until_idle()
    assert harness.prefix_cache.num_checkpoints == 2
    counts = []
    for prompt in (prompts[0], prompts[1]):
        rid = harness.submit(prompt=prompt)
        harness.run_until_idle()
        counts.append(cached(harness, rid))
    assert counts == [8, 0]


def test_a_pinned_prefix_keeps_its_state_longest(make_harness):
    harness = make_harness(
        num_checkpoints=2, checkpoint_pages=100, num_pages=128, cache={"pin_fraction": 0.5}
    )
    pinned = prompt_of(9)
    harness.submit(prompt=pinned)
    harness.run_until_idle()
    ids = np.array(pinned, dtype=np.int32).tobytes()
    assert harness.scheduler._kv.pin("", ids, 1e9) == 2
    for seed in range(1, 5):
        harness.submit(prompt=prompt_of(9, seed=seed))
        harness.run_until_idle()
    rid = harness.submit(prompt=pinned)
    harness.run_until_idle()
    assert cached(harness, rid) == 8


def test_a_long_prompt_takes_a_part_of_the_slots(make_harness):
    harness = make_harness(num_checkpoints=8, checkpoint_pages=1, num_pages=128, chunked_prefill_size=-1)
    prompt = prompt_of(9, seed=1)
    harness.submit(prompt=prompt, max_new_tokens=1)
    harness.submit(prompt=prompt_of(200), max_new_tokens=1)
    harness.run_until_idle()
    assert harness.prefix_cache.num_checkpoints == 4
    rid = harness.submit(prompt=prompt)
    harness.run_until_idle()
    assert cached(harness, rid) == 8


def test_evicted_and_flushed_pages_free_their_states(make_harness):
    harness = make_harness(num_pages=24)
    for seed in range(12):
        harness.submit(prompt=prompt_of(30, seed=seed))
        harness.run_until_idle()
    assert harness.scheduler.report(harness.now_s).totals.evicted_tokens > 0
    harness.flush()
    assert harness.prefix_cache.num_checkpoints == 0
    harness.scheduler.on_idle()


def test_a_retracted_request_starts_again_from_its_last_checkpoint(make_harness):
    harness = make_harness(num_pages=128, checkpoint_pages=1, chaos="retract=0.2:9")
    rids = [harness.submit(prompt=prompt_of(20, seed=seed), max_new_tokens=80) for seed in range(4)]
    batches = harness.run_until_idle()
    assert sum(harness.answers[rid].rows[-1].usage.num_retractions for rid in rids) > 0
    again = [new for batch in batches for new in batch.plan.new_reqs if len(new.input_ids) > 4 * 20]
    assert any(new.checkpoint for new in again)


def test_rounds_that_do_not_run_leave_no_checkpoint(make_harness):
    """A burst plans a state at its third round and ends after the first one: the slot must not be taken for a state."""
    harness = make_harness(checkpoint_pages=1, multi_step_ms=1e9)
    harness.has_news = lambda: harness.rng.random() < 0.7
    rids = [harness.submit(prompt=prompt_of(9, seed=seed), max_new_tokens=60) for seed in range(3)]
    harness.run_until_idle()
    for rid in rids:
        answer = harness.answers[rid]
        harness.submit(prompt=answer.prompt + answer.tokens)
    harness.run_until_idle()
    assert harness.runner.num_rounds > harness.runner.steps / 2


def test_drafts_may_be_rejected(make_harness, monkeypatch):
    drafts, source = NgramProposer.drafts, random.Random(0)

    def partly_wrong(self: NgramProposer, count: int) -> list[int]:
        token_ids = drafts(self, count)
        wrong = source.randrange(2 * len(token_ids) or 1)
        return [1 + token % 96 if idx == wrong else token for idx, token in enumerate(token_ids)]

    monkeypatch.setattr(NgramProposer, "drafts", partly_wrong)
    harness = make_harness(
        num_checkpoints=200,
        memory=2,
        checkpoint_pages=1,
        speculative="ngram",
        speculative_num_draft_tokens=3,
        num_pages=300,
    )
    prompts = [prompt_of(5, seed=seed) * 6 for seed in range(6)]
    rids = [harness.submit(prompt=prompt, max_new_tokens=60) for prompt in prompts]
    harness.run_until_idle()
    report = harness.scheduler.report(harness.now_s)
    assert 0 < report.totals.accepted_draft_tokens < report.totals.draft_tokens
    for rid in rids:
        answer = harness.answers[rid]
        again = harness.submit(prompt=answer.prompt + answer.tokens)
        harness.run_until_idle()
        assert cached(harness, again) > 40


def test_forced_tokens_of_a_grammar_are_no_drafts(make_harness):
    harness = make_harness()
    harness.submit(
        prompt=prompt_of(9),
        grammar=ToyGrammar(seed=2, forced=((1, 20),)),
        max_new_tokens=30,
        ignore_eos=False,
    )
    batches = harness.run_until_idle()
    assert not any(batch.plan.draft_ids for batch in batches)


def test_without_a_prefix_cache_every_request_starts_from_zeros(make_harness):
    harness = make_harness(num_checkpoints=0, radix_cache=False)
    harness.submit(prompt=prompt_of(30))
    harness.run_until_idle()
    rid = harness.submit(prompt=prompt_of(30))
    harness.run_until_idle()
    assert cached(harness, rid) == 0


def test_samples_of_one_prompt_share_its_whole_pages(make_harness):
    harness = make_harness()
    prompt = prompt_of(27)
    for idx in range(3):
        harness.submit(f"n{idx}", prompt=prompt, message={"group": "n"})
    batches = harness.run_until_idle()
    assert not any(batch.plan.page_copies for batch in batches)
    assert cached(harness, "n1") == cached(harness, "n2") == 24


def test_a_lost_slot_is_an_error(make_harness):
    harness = make_harness()
    harness.submit(prompt=prompt_of(20))
    harness.run_until_idle()
    harness.scheduler._parts.memory.kv.state_slots._free.pop()
    with pytest.raises(LedgerError, match="state equation: free 1[0-9] .* 16 slots"):
        harness.scheduler.on_idle()


def test_a_slot_with_two_owners_is_an_error(make_harness):
    harness = make_harness()
    harness.submit(prompt=prompt_of(20))
    harness.run_until_idle()
    slots = harness.scheduler._parts.memory.kv.state_slots
    slots._free[0] = slots._free[1]
    with pytest.raises(LedgerError, match="slots of checkpoints with an owner"):
        harness.scheduler.audit()


class StateMachine(SchedulerMachine):
    """The same with states."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(3, 40),
        max_running_requests=st.integers(1, 6),
        num_checkpoints=st.sampled_from([1, 2, 3, 9, 40]),
        checkpoint_pages=st.sampled_from([1, 2, 5]),
        overlap=st.sampled_from([0, 0, 1, 2]),
        phases=st.sampled_from(["mixed", "prefill-first"]),
        schedule_policy=st.sampled_from(["fcfs", "lpm"]),
        chunked_prefill_size=st.sampled_from([-1, 1, 8, 24]),
        schedule_conservativeness=st.sampled_from([0.01, 0.3, 1.0]),
        multi_step_ms=st.sampled_from([0.0, 25.0, 1e9]),
        chaos=st.sampled_from([None, None, "retract=0.2:50"]),
        memory=st.sampled_from([None, None, 2]),
        news=st.randoms(use_true_random=False),
    )
    def make(self, overlap: int, multi_step_ms: float, news: random.Random, **config: Any) -> None:
        if config["memory"] and not overlap:  # outputs run into circles, which are drafted
            config |= {"speculative": "ngram", "speculative_num_draft_tokens": 3}
        super().make(overlap, multi_step_ms, news, **config)


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=examples(80), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
