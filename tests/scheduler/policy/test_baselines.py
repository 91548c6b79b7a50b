"""Tests of the text-book baselines: fifo-serial and static."""

import pytest

from engine.scheduler.records.verdict import Reason

from .model import Model


def test_fifo_serial_runs_one_at_a_time():
    model = Model("fifo-serial", max_rows=8)
    for _ in range(5):
        model.submit(4, 10)

    while model.waiting or model.rows:
        assert len(model.step()) <= 1
        assert len(model.rows) <= 1

    assert set(model.reasons) == {None, Reason.ONE_AT_A_TIME}


def test_the_text_book_comparison():
    """Eight answers of 10 to 80 tokens on four rows: one at a time takes the sum, batches the sum of their slowest."""
    lens = [10, 80, 20, 40, 30, 10, 60, 50]
    steps = {}
    for policy in ("fifo-serial", "static", "fcfs"):
        model = Model(policy, max_rows=4, static_batch_size=4)
        for output_len in lens:
            model.submit(4, output_len)
        model.run()
        steps[policy] = max(model.ended_s.values()) - 100.0

    assert steps == {"fifo-serial": sum(lens), "static": 80 + 60, "fcfs": 90}


def test_static_waits_for_the_slowest():
    model = Model("static", max_rows=8, static_batch_size=2)
    slow, fast, next_one, last = (model.submit(4, output_len) for output_len in (20, 2, 5, 5))
    model.run()

    assert model.ended_s[fast.rid] == 102
    assert model.started_s[next_one.rid] == model.started_s[last.rid] == model.ended_s[slow.rid] + 1
    assert Reason.BATCH_RUNNING in model.reasons


def test_static_waits_for_a_full_batch_but_not_for_ever():
    model = Model("static", static_batch_size=3, static_batch_wait=10.0)
    reqs = [model.submit(4, 2), model.submit(4, 2)]
    for _ in range(9):
        assert model.step() == []
    assert set(model.reasons) == {Reason.BATCH_FORMING}
    assert model.policy.wake_s(model.waiting) == 110.0

    assert model.step() == reqs  # at 110
    assert model.policy.wake_s(model.waiting) is None


def test_static_starts_at_once_when_the_batch_is_full():
    model = Model("static", static_batch_size=3, static_batch_wait=1000.0)
    reqs = [model.submit(4, 2) for _ in range(3)]

    assert model.step() == reqs


def test_static_fills_its_batch_over_several_passes():
    """Prompts of 30 and a budget of 40 per step: the third is admitted in the third step, and nobody besides."""
    model = Model("static", max_rows=8, step_tokens=40, static_batch_size=3)
    batch = [model.submit(30, 20) for _ in range(3)]
    others = [model.submit(1, 1) for _ in range(2)]
    model.run()

    assert model.order_of_start[:3] == batch
    batch_ends_s = max(model.ended_s[req.rid] for req in batch)
    assert all(model.started_s[req.rid] > batch_ends_s for req in others)


def test_a_member_that_lost_its_place_still_belongs_to_the_batch():
    model = Model("static", max_rows=8, static_batch_size=2)
    first, second, other = (model.submit(4, 10) for _ in range(3))
    model.step()
    model.retract(first)

    assert model.step() == [first]
    model.run()
    assert model.order_of_start == [first, second, first, other]


@pytest.mark.parametrize("position", [0, 1])
def test_the_batch_does_not_wait_for_an_aborted_member(position):
    model = Model("static", max_rows=8, step_tokens=10, static_batch_size=2, static_batch_wait=0.0)
    members = [model.submit(10, 5), model.submit(10, 5)]
    other = model.submit(4, 5)
    model.step()
    model.abort(members[position])
    model.run()

    assert model.started_s[other.rid] == model.ended_s[members[1 - position].rid] + 1


def test_nobody_hangs_in_static_when_the_row_limit_is_below_the_batch():
    model = Model("static", max_rows=2, static_batch_size=8)
    for _ in range(9):
        model.submit(4, 3)

    model.run(max_steps=100)

    assert len(model.ended_s) == 9


def test_a_member_on_the_host_is_let_back():
    """Its KV was swapped out: it is in no queue of the policy's, and has no row."""
    model = Model("static", max_rows=8, static_batch_size=2)
    model.submit(4, 10)
    swapped = model.submit(4, 10)
    model.step()
    assert model.policy.hold(model.waiting, model.now_s) is Reason.BATCH_RUNNING

    model.rows.remove(swapped)

    assert model.policy.hold(model.waiting, model.now_s) is None
    assert model.policy.max_offers(model.waiting) == 1


@pytest.mark.parametrize("why", ["memory", "rule"])
def test_nobody_takes_the_place_of_a_member_that_cannot_start_yet(why):
    """It lacks memory until the first one ends, or its adapter is not there: small ones behind it stay outside."""
    model = Model("static", max_rows=8, static_batch_size=2, kv_tokens=100)
    first = model.submit(20, 20)
    second = model.submit(60, 20)
    outsiders = [model.submit(4, 4), model.submit(4, 4)]
    if why == "rule":
        model.kv_tokens = 1000
        model.stuck.add(second.seq)
        model.run_until(lambda: first.rid in model.ended_s)
        model.stuck.clear()
    model.run()

    assert model.order_of_start == [first, second, *outsiders]


def test_asking_how_many_may_be_offered_changes_nothing():
    model = Model("static", max_rows=8, static_batch_size=2)
    for _ in range(3):
        model.submit(4, 4)
    assert [model.policy.max_offers(model.waiting) for _ in range(3)] == [2, 2, 2]

    early = next(iter(model.waiting))
    model.abort(early)  # the batch was not closed by being looked at

    assert [req.seq for req in model.step()] == [2, 3]
