"""Tests of fcfs, lof and random by the effect they exist for."""

import numpy as np

from .model import Model


def test_fcfs_starts_in_the_order_of_arrival():
    model = Model("fcfs", max_rows=1)
    reqs = [model.submit(length, 2) for length in (9, 3, 30, 12)]

    model.run()

    assert model.order_of_start == reqs


def test_lof_ends_a_batch_of_jobs_earlier():
    """Two rows, one long job at the end of the queue: begun last it runs alone, begun first it hides the others."""
    makespan = {}
    for policy in ("fcfs", "lof"):
        model = Model(policy, max_rows=2)
        for output_len in (10, 10, 10, 10, 40):
            model.submit(1, output_len)
        model.run()
        makespan[policy] = max(model.ended_s.values()) - 100.0

    assert makespan == {"fcfs": 60, "lof": 40}


def test_random_differs_by_seed_and_not_by_run():
    def order(seed):
        model = Model("random", policy_seed=seed)
        for _ in range(100):
            model.submit()
        return [req.seq for req in model.order()]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(1, 101))


def test_random_is_no_order_by_arrival():
    model = Model("random", policy_seed=3)
    for _ in range(1000):
        model.submit()

    order = [req.seq for req in model.order()]

    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1


def test_random_keeps_the_order_of_those_that_wait():
    model = Model("random", policy_seed=4)
    for _ in range(50):
        model.submit()
    before = [req.seq for req in model.order()]

    for _ in range(50):
        model.submit()

    assert [req.seq for req in model.order() if req.seq <= 50] == before
