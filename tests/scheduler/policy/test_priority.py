"""Tests of the priority policy."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from .model import Model, make_req


def test_urgent_requests_do_not_wait_for_others():
    """Ten of priority 0 wait when an urgent one comes: it waits for one of them under priority, for all under fcfs."""
    waited = {}
    for policy in ("fcfs", "priority"):
        model = Model(policy, max_rows=1)
        for _ in range(10):
            model.submit(1, 5)
        model.step()
        urgent = model.submit(1, 5, priority=5)
        model.run()
        waited[policy] = model.started_s[urgent.rid] - model.arrived_s[urgent.rid]

    assert waited == {"fcfs": 50, "priority": 5}


def test_equal_priorities_come_by_arrival():
    model = Model("priority", max_rows=1, priority_ageing=0.0)
    reqs = [model.submit(1, 2, priority=priority) for priority in (1, 2, 1, 2, -1, 0)]

    model.run()

    assert model.order_of_start == [reqs[idx] for idx in (1, 3, 0, 2, 5, 4)]


def test_without_ageing_priorities_are_strict():
    model = Model("priority", max_rows=1, priority_ageing=0.0)
    low = model.submit(1, 1)
    for _ in range(500):
        model.submit(1, 1, priority=1)
        model.step()

    assert low in set(model.waiting)


@given(
    ageing=st.sampled_from([0.5, 1.0, 8.0]),
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(-3, 3)), min_size=2, max_size=20),
)
def test_a_level_is_worth_its_seconds(ageing, arrivals):
    """Exactly those come before a request that have so much more priority for each second they came later."""
    model = Model("priority", priority_ageing=ageing)
    for wait_s, priority in arrivals:
        model.now_s += wait_s
        model.submit(priority=priority)

    order = model.order()

    for first, second in itertools.pairwise(order):
        assert (second.arrival_s - first.arrival_s) >= (second.priority - first.priority) * ageing


def test_whether_it_preempts_is_a_setting():
    assert Model("priority").policy.preempts
    assert not Model("priority", priority_preemption=False).policy.preempts
    assert not Model("fcfs").policy.preempts


def test_a_request_that_has_waited_its_time_is_not_displaced():
    """Priority 0 that came 300 s before 15: it is worth 30 levels, so it would come first, and stays where it is."""
    policy = Model("priority", priority_ageing=10.0).policy
    old, fresh = make_req(1, priority=0, arrival_s=0.5), make_req(2, priority=0, arrival_s=290.0)
    urgent = make_req(3, priority=15, arrival_s=300.5)

    assert not policy.may_displace(urgent, old)
    assert policy.may_displace(urgent, fresh)
    assert not Model("priority", priority_preemption=False).policy.may_displace(urgent, fresh)
    assert not Model("fcfs").policy.may_displace(urgent, fresh)
