"""What is learned from measured times, and what is not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.step_size.online_fit import OnlineFit
from tests.selection import examples


def work(rng: random.Random) -> tuple[float, float]:
    """Tokens and pairs of a chunk somewhere in a prompt."""
    length, start = rng.randint(1, 512), rng.randint(0, 2000)
    return float(length), length * start + length * (length + 1) / 2


@settings(max_examples=examples(100))
@given(st.floats(1e-5, 1e-2), st.floats(0, 1e-5), st.integers(0, 1 << 30))
def test_exact_times_are_predicted(token_s, pair_s, seed):
    rng = random.Random(seed)
    fit = OnlineFit((1.0, 10.0))
    for _ in range(200):
        tokens, pairs = work(rng)
        fit.learn((tokens, pairs), token_s * tokens + pair_s * pairs)
    for _ in range(20):
        tokens, pairs = work(rng)
        expected = token_s * tokens + pair_s * pairs
        assert fit.predict((tokens, pairs)) == pytest.approx(expected, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 10**8), st.floats(0, 1e3)), max_size=60))
def test_more_work_never_takes_less(measurements):
    fit = OnlineFit((1.0, 10.0))
    for tokens, pairs, seconds in measurements:
        fit.learn((tokens, pairs), seconds)
        assert all(0 <= coefficient < 1e9 for coefficient in fit.coefficients)


def test_the_same_measurements_give_the_same_bits():
    rng = random.Random(1)
    samples = [(work(rng), rng.random()) for _ in range(100)]
    fits = [OnlineFit((1.0, 10.0)) for _ in range(2)]
    for fit in fits:
        for features, seconds in samples:
            fit.learn(features, seconds)
    assert fits[0].coefficients == fits[1].coefficients


def test_the_first_measurement_is_put_down_to_what_is_least_stiff():
    fit = OnlineFit((1.0, 10.0))
    fit.learn((500.0, 125_000.0), 0.2)
    assert fit.predict((500.0, 125_000.0)) == pytest.approx(0.2, rel=0.02)
    assert 0.03 < fit.predict((100.0, 5000.0)) <= 0.05  # a fifth would be 0.04


def test_a_step_that_was_held_up_changes_little():
    fit = OnlineFit((1.0,))
    for _ in range(50):
        fit.learn((100.0,), 0.1)
    fit.learn((100.0,), 50.0)
    assert 0.1 <= fit.predict((100.0,)) < 0.11


@pytest.mark.parametrize("factor", [0.1, 5.0])
def test_a_machine_that_has_changed_is_followed(factor):
    fit = OnlineFit((1.0,))
    for _ in range(50):
        fit.learn((100.0,), 0.1)
    for _ in range(250):
        fit.learn((100.0,), 0.1 * factor)
    assert fit.predict((100.0,)) == pytest.approx(0.1 * factor, rel=0.1)


def test_what_measurements_say_nothing_about_stays():
    """A long answer to one client does not make the engine forget what many cost."""
    fit = OnlineFit((1.0, 10.0))
    rng = random.Random(3)
    for _ in range(200):
        rows = float(rng.randint(1, 64))
        fit.learn((1.0, rows), 0.009 + 0.0005 * rows)
    for _ in range(2000):
        fit.learn((1.0, 1.0), 0.0095)
    assert fit.predict((1.0, 64.0)) == pytest.approx(0.041, rel=0.02)


def test_a_time_of_nothing_is_no_measurement():
    fit = OnlineFit((1.0,))
    fit.learn((100.0,), 0.0)
    assert fit.coefficients == (0.0,)
