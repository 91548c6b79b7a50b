"""When a fleet grows and shrinks, in virtual time."""

from __future__ import annotations

import pytest

from engine.runtime.errors import ConfigError
from engine.supervisor.fleet.scaling import MAX_REPLICAS, Load, ScaleBounds, ScalePolicy

BOUNDS = ScaleBounds(min_replicas=1, max_replicas=8, queue_tokens=1000, up_after_s=10.0, down_after_s=60.0)
IDLE = Load(0, 0.1)


def run(
    policy: ScalePolicy, target: int, loads: list[Load], seconds: range, num_pending: int = 0
) -> list[int]:
    """The targets in these seconds; the loads stay as they are, the target does not."""
    found = []
    for now_s in seconds:
        target = policy.target(float(now_s), target, loads, num_pending)
        found.append(target)
    return found


def test_a_queue_must_last_before_replicas_are_added():
    policy = ScalePolicy(BOUNDS)
    crowded = [Load(1500), Load(600)]  # 2,100 of the 2,000 that two may have
    assert run(policy, 2, crowded, range(10)) == [2] * 10
    assert policy.target(10.0, 2, crowded, 0) == 3


def test_a_short_queue_in_between_begins_the_time_anew():
    policy = ScalePolicy(BOUNDS)
    run(policy, 2, [Load(3000), Load(0)], range(10))
    assert policy.target(10.0, 2, [Load(2000), Load(0)], 0) == 2, "exactly what they may have"
    assert run(policy, 2, [Load(3000), Load(0)], range(11, 21)) == [2] * 10
    assert policy.target(21.0, 2, [Load(3000), Load(0)], 0) == 3


@pytest.mark.parametrize(
    ("target", "waiting", "wanted"), [(1, 1500, 2), (2, 3900, 4), (3, 4500, 5), (2, 10**6, 4), (6, 10**6, 8)]
)
def test_as_many_are_added_as_the_queue_needs_but_at_most_twice_as_many(target, waiting, wanted):
    loads = [Load(waiting)] + [Load()] * (target - 1)
    assert run(ScalePolicy(BOUNDS), target, loads, range(11))[-1] == wanted


def test_nothing_changes_while_a_replica_starts():
    policy = ScalePolicy(BOUNDS)
    assert run(policy, 2, [Load(9000)], range(100), num_pending=1) == [2] * 100
    assert run(policy, 2, [Load(9000), Load(9000)], range(100, 110)) == [2] * 10, "measured from here on"


def test_one_is_taken_away_when_the_others_have_long_been_enough():
    policy = ScalePolicy(BOUNDS)
    loads = [Load(0, 0.3), Load(0, 0.4), Load(0, 0.3)]  # 1.0 for two is 0.5 each
    assert run(policy, 3, loads, range(60)) == [3] * 60
    assert policy.target(60.0, 3, loads, 0) == 2
    assert policy.target(61.0, 2, loads[:2], 0) == 2, "the next one needs its own time"


@pytest.mark.parametrize("loads", [[Load(0, 0.5), Load(0, 0.1)], [Load(1, 0.0), Load(0, 0.0)]])
def test_none_is_taken_away_if_the_rest_would_be_busy_or_something_waits(loads):
    assert set(run(ScalePolicy(BOUNDS), 2, loads, range(1000))) == {2}


def test_the_bounds_hold():
    assert set(run(ScalePolicy(BOUNDS), 1, [IDLE], range(1000))) == {1}
    assert set(run(ScalePolicy(BOUNDS), 8, [Load(10**9)] * 8, range(1000))) == {8}
    above_two = ScaleBounds(min_replicas=2, max_replicas=4)
    assert set(run(ScalePolicy(above_two), 2, [IDLE, IDLE], range(1000))) == {2}


def test_equal_bounds_switch_it_off():
    fixed = ScaleBounds(min_replicas=2, max_replicas=2)
    assert fixed.is_fixed
    assert set(run(ScalePolicy(fixed), 3, [Load(10**9)] * 3, range(1000))) == {3}


def test_a_steady_load_does_not_make_it_swing():
    """The queue of three is more than two may have, but three are not idle."""
    policy, target, changes = ScalePolicy(BOUNDS), 2, 0
    for now_s in range(3600):
        queue = 2500 if target == 2 else 0
        loads = [Load(queue // target, 0.9 if target == 2 else 0.6)] * target
        wanted = policy.target(float(now_s), target, loads, 0)
        changes += wanted != target
        target = wanted
    assert (target, changes) == (3, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_replicas": 0, "max_replicas": 2},
        {"min_replicas": 3, "max_replicas": 2},
        {"min_replicas": 1, "max_replicas": MAX_REPLICAS + 1},
        {"min_replicas": 1, "max_replicas": 2, "queue_tokens": 0},
        {"min_replicas": 1, "max_replicas": 2, "up_after_s": -1.0},
        {"min_replicas": 1, "max_replicas": 2, "down_after_s": float("inf")},
    ],
)
def test_bounds_that_cannot_be_are_refused(fields):
    with pytest.raises(ConfigError, match="must"):
        ScaleBounds(**fields)
