"""The rules of `scheduler/estimator.py` inside a scheduler: what each one is for, and that all of them end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runtime.messages import FinishKind
from tests.feasible import fits
from tests.scheduler.harness import Harness
from tests.selection import examples

NAMES = ("ratio", "beta", "full", "none")

requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # tokens of the prompt
        st.integers(0, 2),  # which beginning it shares
        st.integers(1, 60),  # max_new_tokens
        st.booleans(),  # ignore_eos
        st.integers(0, 5),  # steps until the next one comes
    ),
    min_size=1,
    max_size=14,
)
settings_of_steps = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4, 16]),
        "num_pages": st.integers(4, 40),
        "max_running_requests": st.integers(1, 6),
        "radix_cache": st.booleans(),
        "overlap": st.sampled_from([0, 1, 2]),
        "phases": st.sampled_from(["mixed", "prefill-first", "decode-first"]),
        "chunked_prefill_size": st.sampled_from([-1, 1, 8, 24]),
        "max_prefill_tokens": st.sampled_from([5, 32, 200]),
        "max_num_batched_tokens": st.sampled_from([None, 1, 16]),
        "num_lookahead_tokens": st.sampled_from([0, 0, 5]),
        "max_num_partial_prefills": st.sampled_from([1, 2, 4]),
        "long_prefill_token_threshold": st.sampled_from([0, 20]),
    }
)
slow_is_fine = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def run_all(config: dict[str, Any], load: list[tuple[int, int, int, bool, int]]) -> Harness:
    """Send the load step by step and run until everything is answered; the harness checks every step and answer."""
    harness = Harness(max_model_len=120, **config)
    rng = random.Random(0)
    beginnings = [[rng.randrange(1, 97) for _ in range(60)] for _ in range(3)]
    for prompt_len, which, max_new_tokens, ignore_eos, num_steps in load:
        shared = beginnings[which][: prompt_len * 2 // 3]
        prompt = shared + [rng.randrange(1, 97) for _ in range(prompt_len - len(shared))]
        harness.submit(prompt=prompt, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        for _ in range(num_steps):
            harness.step()
    harness.run_until_idle()
    for answer in harness.answers.values():
        assert answer.finish is not None and answer.sampling.max_new_tokens is not None
        ran = answer.finish.kind in (FinishKind.STOP, FinishKind.LENGTH)
        assert ran == fits(len(answer.prompt), answer.sampling.max_new_tokens, harness.capacity)
    return harness


@pytest.mark.slow
@slow_is_fine
@given(config=settings_of_steps, load=requests)
def test_full_reservation_never_needs_a_retraction(config, load):
    harness = run_all({**config, "admission_estimator": "full"}, load)

    assert harness.scheduler.report(0.0).totals.retracted_reqs == 0


@pytest.mark.slow
@pytest.mark.parametrize("max_num_partial_prefills", [1, 4])
def test_full_reservation_counts_pages_and_not_tokens(max_num_partial_prefills):
    """Large pages, and answers that all use their limits: a page forgotten would be a retraction."""
    for seed in range(30):
        rng = random.Random(seed)
        load = [(rng.randint(1, 50), 0, rng.randint(1, 60), True, rng.randint(0, 3)) for _ in range(16)]
        config = {
            "admission_estimator": "full",
            "page_size": 16,
            "num_pages": rng.randint(10, 24),
            "max_running_requests": 12,
            "radix_cache": False,
            "chunked_prefill_size": rng.choice([16, 48]),
            "max_num_partial_prefills": max_num_partial_prefills,
        }
        harness = run_all(config, load)
        assert harness.scheduler.report(0.0).totals.retracted_reqs == 0, seed


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["ratio", "beta", "none"])
@settings(slow_is_fine, max_examples=examples(20))
@given(config=settings_of_steps, load=requests)
def test_whatever_fits_runs_to_its_end(name, config, load):
    run_all({**config, "admission_estimator": name, "schedule_conservativeness": 0.01}, load)


def test_the_rules_differ_in_how_many_run_and_how_many_lose_their_place(
    make_scheduler: Callable[..., Harness],
) -> None:
    """Twelve requests that use all of their 60 tokens, in memory for six of them at their end.

    What is kept for those who come decides it: everything; all of a candidate's and 70 % of what is left to those that
    run; a half, then more as it is used; nothing.
    """
    figures = {}
    for name in NAMES:
        harness = make_scheduler(
            admission_estimator=name, num_pages=96, page_size=4, max_running_requests=12, radix_cache=False
        )
        for _ in range(12):
            harness.submit(prompt_len=4, max_new_tokens=60, ignore_eos=False, min_new_tokens=60)
        most = 0
        while harness.scheduler.num_unfinished:
            batch = harness.step()
            most = max(most, len(batch) if batch is not None else 0)
        figures[name] = (most, harness.scheduler.report(0.0).totals.retracted_reqs)

    assert figures == {"full": (5, 0), "ratio": (7, 1), "beta": (11, 5), "none": (12, 7)}


def test_beta_learns_how_much_of_their_limits_requests_use(make_scheduler: Callable[..., Harness]) -> None:
    """After a hundred answers far below their limits, more requests run together than with everything kept."""
    at_once = {}
    for name in ("beta", "full"):
        harness = make_scheduler(
            admission_estimator=name,
            num_pages=128,
            page_size=4,
            max_running_requests=16,
            radix_cache=False,
            max_model_len=400,
            eos=range(14),  # every seventh token or so ends an answer
        )
        for _ in range(110):  # one after the other, so that they finish in order
            rid = harness.submit(prompt_len=4, max_new_tokens=200, ignore_eos=False)
            while harness.answers[rid].finish is None:
                harness.step()
        shares = [len(answer.tokens) / 200 for answer in harness.answers.values()][-100:]
        mean = sum(shares) / 100
        assert 0.02 < mean < 0.2, "the answers are not as short as the test wants them"
        learned = harness.scheduler.report(0.0).new_token_ratio
        assert learned == (pytest.approx(mean) if name == "beta" else 1.0)
        for _ in range(16):
            harness.submit(prompt_len=4, max_new_tokens=200, ignore_eos=False)
        batch = harness.step()
        at_once[name] = 0 if batch is None else len(batch)
        harness.run_until_idle()
    assert at_once["full"] == 2 and at_once["beta"] >= 10, at_once
