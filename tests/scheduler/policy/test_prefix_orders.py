"""Tests of the orders that look at the prefix cache: lpm, dfs-weight, hrrn."""

import itertools

import pytest

from engine.scheduler.memory.kv_memory import MAX_LOOKUPS
from engine.scheduler.policy.base import MAX_SORTED

from ..harness import Harness
from .model import PAGE_SIZE, Model, TreeNode


def test_lpm_keeps_the_order_of_arrival_among_equals():
    model = Model("lpm")
    reqs = [model.submit() for _ in range(4)]
    model.cache(reqs[2], 1)

    assert model.order() == [reqs[2], reqs[0], reqs[1], reqs[3]]


@pytest.mark.parametrize("name", ["lpm", "dfs-weight", "hrrn"])
def test_above_128_waiting_it_is_first_come_first_served(name):
    model = Model(name, max_rows=1)
    model.submit(1, 1)
    hit = [model.submit(100, 1) for _ in range(MAX_SORTED + 1)][-1]
    model.step()
    model.cache(hit, 20, TreeNode(None), 20)

    assert model.order()[0] is not hit  # 129 wait
    model.step()
    assert model.order()[0] is hit  # 128 wait


def branches_in_order(policy):
    """Two branches under a common root, three requests each, alternating; one more stands at the root."""
    model = Model(policy)
    root = TreeNode(None)
    branches = {"a": TreeNode(root), "b": TreeNode(root)}
    names = {}
    for branch in ("a", "b", "a", "b", "b"):
        req = model.submit(prompt_len=40)
        model.cache(req, 8, branches[branch], 4)
        names[req.seq] = branch
    stem, stranger = model.submit(prompt_len=40), model.submit(prompt_len=40)
    model.cache(stem, 4, root, 4)
    names |= {stem.seq: "stem", stranger.seq: "nothing"}
    return [names[req.seq] for req in model.order()]


def test_dfs_weight_finishes_one_branch_before_the_next():
    """Equal matches: lpm takes turns, so that both branches have to stay cached; this needs one at a time."""
    assert branches_in_order("lpm") == ["a", "b", "a", "b", "b", "stem", "nothing"]
    assert branches_in_order("dfs-weight") == ["b", "b", "b", "a", "a", "stem", "nothing"]


def test_dfs_weight_goes_down_the_whole_way_and_takes_longer_matches_first():
    model = Model("dfs-weight")
    node = root = TreeNode(None)
    for _ in range(5000):  # deeper than Python's stack
        node = TreeNode(node)
    at_root, short, long, deep = (model.submit(prompt_len=90) for _ in range(4))
    side = TreeNode(root)
    model.cache(at_root, 1, root, 1)
    model.cache(short, 2, side, 1)
    model.cache(long, 5, side, 4)
    model.cache(deep, 20, node, 1)

    assert model.order() == [long, short, deep, at_root]


def test_dfs_weight_keeps_namespaces_apart():
    model = Model("dfs-weight")
    roots = [TreeNode(None), TreeNode(None)]
    reqs = [model.submit(prompt_len=40) for _ in range(3)]
    for req, root in zip(reqs, [roots[0], roots[1], roots[1]], strict=True):
        model.cache(req, 3, root, 3)

    assert model.order() == [reqs[1], reqs[2], reqs[0]]


def test_hrrn_weighs_the_wait_against_the_prompt():
    """After 32 tokens of others: a prompt of 16 that waited for all has ratio 2, one of 4 that waited for 4 has 1."""
    model = Model("hrrn", max_rows=1)
    running = model.submit(4, 100)
    model.step()  # the clock is 4
    patient = model.submit(16, 1)
    model.run_until(lambda: running.output_len == 29)  # 32
    brief = model.submit(4, 1)
    model.run_until(lambda: running.output_len == 33)  # 36

    assert model.order() == [patient, brief]  # 32 / 16 > 4 / 4

    model.run_until(lambda: running.output_len == 43)  # 46

    assert model.order() == [brief, patient]  # 14 / 4 > 42 / 16


def test_hrrn_counts_only_what_is_not_cached():
    model = Model("hrrn", max_rows=1)
    model.submit(4, 9)
    model.step()
    long, short = model.submit(40, 1), model.submit(10, 1)
    model.step()
    assert model.order() == [short, long]

    model.cache(long, 36 // PAGE_SIZE)

    assert model.order() == [long, short]


def test_hrrn_lowers_the_mean_wait_without_starving_the_long():
    """A long prompt among a stream of short ones: shortest first makes it wait for all of them, fcfs the short ones."""
    waits = {}
    for policy in ("fcfs", "hrrn", "sjf"):
        model = Model(policy, max_rows=1, length_ageing=0.0)
        model.submit(5, 5)
        model.step()
        long = model.submit(60, 60)
        for _ in range(40):
            model.submit(5, 5)
            for _ in range(4):
                model.step()
        mean_s = model.run()
        waits[policy] = (round(mean_s), round(model.started_s[long.rid] - model.arrived_s[long.rid]))

    assert waits == {
        "fcfs": (86, 5),
        "hrrn": (44, 165),
        "sjf": (34, 205),
    }  # (mean to the end, of the long to the start)


def lookups(harness, monkeypatch):
    """Counts what the radix tree is asked, per call of the returned function."""
    cache, asked = harness.prefix_cache, []
    match = cache.match

    def counted(self, *args):
        asked.append(args)
        return match(*args)

    monkeypatch.setattr(type(cache), "match", counted)

    def count():
        num_asked = len(asked)
        asked.clear()
        return num_asked

    return count


@pytest.mark.parametrize("name", ["lpm", "dfs-weight", "hrrn"])
def test_a_cache_that_changes_in_each_step_does_not_have_the_whole_queue_looked_up_in_each(name, monkeypatch):
    """100 wait while one generates, a page in each step: 16 look-ups for the order and those of who is offered."""
    harness = Harness(schedule_policy=name, max_running_requests=1, num_pages=200, page_size=1)
    harness.submit(prompt_len=8, max_new_tokens=40)
    harness.step()
    count = lookups(harness, monkeypatch)
    for number in range(100):
        harness.submit(prompt_len=8 + number % 7, max_new_tokens=1)
    harness.step()
    assert count() >= 100  # new ones are looked up at once

    for _ in range(20):
        harness.step()
        assert count() <= MAX_LOOKUPS + 2


def test_everybodys_turn_to_be_looked_up_comes():
    """The cache has changed for 100 requests that wait: 16 of them know it after each look at the queue."""
    harness = Harness(schedule_policy="lpm", max_running_requests=1, num_pages=400, page_size=1)
    harness.submit(prompt_len=8, max_new_tokens=60)
    harness.step()
    rids = [harness.submit(prompt_len=30, max_new_tokens=1) for _ in range(100)]
    harness.step()
    parts = harness.scheduler._parts
    reqs = [parts.requests.by_id[rid] for rid in rids]
    generation = reqs[0].match_generation
    while harness.prefix_cache.generation == generation:
        harness.step()

    def num_current():
        return sum(req.match_generation == harness.prefix_cache.generation for req in reqs)

    known = []
    for _ in range(8):
        parts.memory.kv.known_matches(reqs)
        known.append(num_current())

    assert known[-1] == 100
    assert all(after - before <= MAX_LOOKUPS for before, after in itertools.pairwise(known))
