"""Tests of the adaptive policy."""

import logging

from engine.scheduler.policy.adaptive import MIN_STEPS

from .model import Model, make_req


def follow(model, loads):
    """The active policy after `MIN_STEPS` steps at each load."""
    active = []
    for load in loads:
        model.kv_share = load
        for _ in range(MIN_STEPS):
            model.policy.planned([], [])
        active.append(model.policy.active_name.removeprefix("adaptive:"))
    return active


def test_each_load_has_its_policy():
    model = Model("adaptive")

    assert follow(model, [0.0, 0.2, 0.5, 0.9, 0.5, 0.1]) == [
        "fcfs",
        "fcfs",
        "priority",
        "lpm",
        "priority",
        "fcfs",
    ]
    assert model.policy.take_notes() == [
        "fcfs -> priority at load 0.50",
        "priority -> lpm at load 0.90",
        "lpm -> priority at load 0.50",
        "priority -> fcfs at load 0.10",
    ]
    assert model.policy.take_notes() == []


def test_the_thresholds_have_a_band():
    model = Model("adaptive")

    assert follow(model, [0.34, 0.36, 0.26, 0.24]) == ["fcfs", "priority", "priority", "fcfs"]
    assert follow(model, [0.5, 0.84, 0.86, 0.76, 0.74]) == ["priority", "priority", "lpm", "lpm", "priority"]


def test_a_load_around_a_threshold_does_not_make_it_flap():
    """400 steps between 0.26 and 0.34, then between 0.2 and 0.4: no switch, and not more than one in 32 steps."""
    model = Model("adaptive")
    for step in range(400):
        model.kv_share = 0.26 if step % 2 else 0.34
        model.policy.planned([], [])
    assert model.policy.take_notes() == []

    for step in range(400):
        model.kv_share = 0.2 if step % 2 else 0.4
        model.policy.planned([], [])
    assert 0 < len(model.policy.take_notes()) <= 400 // MIN_STEPS + 1


def test_load_is_the_larger_of_rows_and_memory():
    model = Model("adaptive", max_rows=4)
    for _ in range(8):
        model.submit(4, 100)
    model.step()

    assert model.policy.active_name == "adaptive:lpm"  # 4 of 4 rows, no memory


def test_a_switch_is_logged(caplog):
    caplog.set_level(logging.INFO)
    follow(Model("adaptive"), [0.95])

    assert "adaptive policy switches from=fcfs to=lpm load=0.95" in caplog.text


def test_every_policy_knows_the_queue_when_its_turn_comes():
    """Requests that came and went under another policy: the order is right at once."""
    model = Model("adaptive", priority_ageing=0.0)
    reqs = [model.submit(priority=priority) for priority in (0, 5, 3)]
    model.cache(reqs[2], 1)
    assert model.order() == reqs

    follow(model, [0.5])
    assert model.order() == [reqs[1], reqs[2], reqs[0]]
    model.abort(reqs[1])

    follow(model, [0.9])
    assert model.order() == [reqs[2], reqs[0]]


def test_it_preempts_only_while_it_goes_by_priority():
    model = Model("adaptive")
    low, urgent = make_req(1), make_req(2, priority=20)
    preempts = []
    for load in (0.1, 0.5, 0.9):
        follow(model, [load])
        preempts.append((model.policy.preempts, model.policy.may_displace(urgent, low)))
        assert model.policy.by_priority is model.policy.preempts

    assert preempts == [(False, False), (True, True), (False, False)]
    never = Model("adaptive", priority_preemption=False)
    follow(never, [0.5])
    assert not never.policy.preempts
    assert never.policy.by_priority  # who is retracted for lack of memory goes by priority all the same
