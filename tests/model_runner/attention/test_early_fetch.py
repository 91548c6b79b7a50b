"""Which steps fetch early, by a clock that says what they took."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.attention.early_fetch import MAX_INTERVAL, MIN_TOKENS, Early, EarlyFetch

MOST = 12 << 20


class Host:
    """Steps that take `with_s` seconds if they fetch early, else `without_s`, times some noise.

    Attributes:
        announced, taken: by a step that may fetch.
    """

    announced, taken = 90, 60

    def __init__(self, with_s: float, without_s: float, noise: float = 0.0, seed: int = 0) -> None:
        self.with_s, self.without_s, self.noise = with_s, without_s, noise
        self.now_s = 0.0
        self.fetched: list[int] = []
        self.early = EarlyFetch(MOST, clock=lambda: self.now_s)
        self._random = random.Random(seed)

    def step(self) -> None:
        shared = Early.from_address(self.early.address)
        fetched = shared.most_bytes
        self.fetched.append(fetched)
        if fetched:
            shared.announced += self.announced
            shared.taken += self.taken
        scale = 1 + self._random.uniform(-self.noise, self.noise)
        self.now_s += scale * (self.with_s if fetched else self.without_s)

    def run(self, count: int, num_tokens: int = 64) -> list[int]:
        """What each of the steps may fetch."""
        for _ in range(count):
            self.early.run(self.step, num_tokens)
        return self.fetched[-count:]


def test_it_stays_where_it_gains():
    host = Host(0.9, 1.0)
    host.run(200)
    late = host.run(500)
    assert set(late) == {0, MOST}
    assert late.count(0) <= 500 // MAX_INTERVAL + 1  # trials, and nothing else


def test_it_ends_where_it_loses_and_says_so(caplog):
    host = Host(1.05, 1.0)
    with caplog.at_level(logging.INFO):
        host.run(60)
    assert "early_fetch=off for some 64 tokens" in caplog.text
    host.run(200)
    assert host.run(500).count(MOST) <= 500 // MAX_INTERVAL + 1


def test_it_returns_when_the_host_has_room_again():
    host = Host(1.05, 1.0)
    host.run(300)
    host.with_s = 0.9
    host.run(8 * MAX_INTERVAL)
    assert host.run(100).count(MOST) >= 100 - 100 // 3


@settings(max_examples=50)
@given(gain=st.sampled_from([-0.08, -0.04, 0.04, 0.08]), noise=st.floats(0, 0.02), seed=st.integers(0, 1000))
def test_noise_costs_little(gain, noise, seed):
    host = Host(1 - gain, 1.0, noise, seed)
    host.run(1000)
    steps = host.run(2000)
    assert steps.count(MOST if gain < 0 else 0) < len(steps) / 8


def test_equal_steps_are_left_as_they_are(caplog):
    host = Host(1.0, 1.0)
    with caplog.at_level(logging.INFO):
        assert host.run(1000).count(0) <= 30
    assert not caplog.records


@settings(max_examples=30)
@given(noise=st.floats(0, 0.1), outliers=st.floats(0, 0.2), seed=st.integers(0, 1000))
def test_noise_alone_changes_little(noise, outliers, seed):
    """Where nothing gains, what is done changes rarely: each time is a line in the log."""
    host = Host(1.0, 1.0, noise, seed)
    source, changes, was_on = random.Random(seed), 0, True
    for _ in range(6000):
        host.with_s = host.without_s = 1.5 if source.random() < outliers else 1.0
        host.run(1)
        (habit,) = host.early._habits.values()
        changes, was_on = changes + (habit.is_on != was_on), habit.is_on
    assert changes <= 12


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_an_outlier_changes_nothing(offset, caplog):
    """In a trial, in the step before it, or in the one behind, while either way takes as long."""
    host = Host(1.0, 1.0)
    host.run(400)
    steps = host.run(2 * MAX_INTERVAL)
    next_trial = MAX_INTERVAL - 1 - steps[::-1].index(0)  # so many steps from now
    with caplog.at_level(logging.INFO):
        host.run(next_trial + offset)
        host.with_s = host.without_s = 50.0
        assert host.run(1) == [0 if offset == 0 else MOST]
        host.with_s = host.without_s = 1.0
        host.run(10 * MAX_INTERVAL)
    assert not caplog.records


@pytest.mark.parametrize("offset", [-1, 1])
def test_nor_do_outliers_that_always_come_beside_trials(offset, caplog):
    host = Host(1.0, 1.0)
    host.run(400)
    next_trial = MAX_INTERVAL - 1 - host.run(2 * MAX_INTERVAL)[::-1].index(0)
    with caplog.at_level(logging.INFO):
        host.run(next_trial + offset)
        for _ in range(30):
            host.with_s = host.without_s = 1.5
            host.run(1)
            host.with_s = host.without_s = 1.0
            host.run(MAX_INTERVAL - 1)
    assert not caplog.records
    assert host.fetched[-MAX_INTERVAL:].count(0) == 1


@pytest.mark.parametrize("num_tokens", [1, MIN_TOKENS - 1])
def test_few_tokens_fetch_nothing(num_tokens):
    assert set(Host(0.5, 1.0).run(300, num_tokens)) == {0}


def test_steps_whose_sizes_change_make_no_trials():
    host = Host(1.5, 1.0)
    for n in range(300):
        host.run(1, 64 + n % 2)
    assert set(host.fetched) == {MOST}


def test_a_trial_needs_a_step_of_its_size_behind_it(caplog):
    host = Host(1.5, 1.0)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            host.run(2)
            host.run(1, 65)
    assert not caplog.records


def test_sizes_have_their_own_habits():
    host = Host(0.9, 1.0)
    for _ in range(12):
        host.with_s = 0.9
        host.run(60, 40)
        host.with_s = 1.1
        host.run(60, 200)
    assert host.run(40, 200).count(MOST) <= 2
    assert host.run(40, 40).count(0) <= 2


def test_nothing_to_fetch_is_never_tried():
    early, calls = EarlyFetch(0), []
    early.run(lambda: calls.append(Early.from_address(early.address).most_bytes), 64)
    assert calls == [0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_step_that_fails_is_no_measurement(place, caplog):
    """The one before a trial, the trial, and the one behind: half a second until it fails, where others take one."""
    host = Host(1.0, 1.0)

    def fail() -> None:
        host.now_s += 0.5
        raise RuntimeError("no")

    with caplog.at_level(logging.INFO):
        for _ in range(100):
            host.run(place)
            with pytest.raises(RuntimeError, match="no"):
                host.early.run(fail, 64)
            assert Early.from_address(host.early.address).most_bytes == MOST
            host.run(3 - place)
    assert not caplog.records


def test_where_nobody_fetches_it_ends_soon_and_says_so_once(caplog):
    host = Host(1.0, 1.0)
    host.taken = 0
    with caplog.at_level(logging.INFO):
        host.run(100)
    assert sum(fetched > 0 for fetched in host.fetched) == 3 and not any(host.fetched[4:])
    assert [record.message for record in caplog.records] == [
        "early_fetch=off: no product of this model fetches anything early"
    ]


def test_what_was_not_announced_could_not_be_fetched(caplog):
    """All that steps read may be shared, and nothing of that is announced."""
    host = Host(1.0, 1.0)
    host.announced = host.taken = 0
    with caplog.at_level(logging.INFO):
        host.run(50)
    assert not caplog.records and host.run(1) == [MOST]


def test_what_others_announce_between_steps_does_not_count(caplog):
    host = Host(1.0, 1.0)
    host.announced = host.taken = 0
    shared = Early.from_address(host.early.address)
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            shared.announced += 90
            host.run(1)
    assert not caplog.records and host.run(1) == [MOST]


def test_what_was_fetched_once_may_be_fetched_again(caplog):
    host = Host(1.0, 1.0)
    host.run(1)
    host.taken = 0
    with caplog.at_level(logging.INFO):
        host.run(100)
    assert not caplog.records and host.early.num_taken == 60
