"""Tests of the fair policy: its bound, and what happens without it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.policy.fair import MAX_IDLE_TENANTS, OUTPUT_WEIGHT, PROMPT_WEIGHT

from .model import Model
from .service import Widest, waits

WEIGHTS = (PROMPT_WEIGHT, OUTPUT_WEIGHT)
MAX_PROMPT_LEN = 60
MAX_OUTPUT_LEN = 25


def bound(max_rows):
    """U of the module's text."""
    return PROMPT_WEIGHT * MAX_PROMPT_LEN + OUTPUT_WEIGHT * max_rows * MAX_OUTPUT_LEN


REQUESTS = st.tuples(
    st.sampled_from("abc"), st.integers(1, MAX_PROMPT_LEN), st.integers(1, MAX_OUTPUT_LEN), st.integers(1, 9)
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    max_rows=st.integers(1, 5),
    step_tokens=st.sampled_from([16, 64, 1000]),
    bursts=st.lists(st.tuples(REQUESTS, st.integers(0, 6)), min_size=1, max_size=40),
    retract_every=st.sampled_from([0, 3, 7]),
    kv_tokens=st.sampled_from([MAX_PROMPT_LEN + MAX_OUTPUT_LEN, 150, 1000]),
)
def test_the_service_of_two_that_wait_differs_by_a_constant(
    max_rows, step_tokens, bursts, retract_every, kv_tokens
):
    """Any bursts of any sizes, chunked prompts, little memory, retractions: counters within U, service within 2 U.

    A tenant whose only request may never start waits all the time, which must change nothing for the others.
    """
    model = Model("fair", max_rows=max_rows, step_tokens=step_tokens, weights=WEIGHTS, kv_tokens=kv_tokens)
    stuck = model.submit(1, 1, tenant="stuck")
    model.stuck.add(stuck.seq)
    widest = {pair: Widest() for pair in ("ab", "bc", "ac")}
    steps = 0

    def step_and_look():
        nonlocal steps
        steps += 1
        model.step()
        counters = [model.policy._counters[tenant] for tenant in "abc" if waits(model, tenant)]
        assert not counters or max(counters) - min(counters) <= bound(max_rows)
        for pair, each in widest.items():
            each.look(model, *pair)
            assert each.value <= 2 * bound(max_rows)
        if retract_every and steps < 200 and steps % retract_every == 0 and model.rows:
            model.retract(model.rows[-1])

    for (tenant, prompt_len, output_len, count), num_steps in bursts:
        for _ in range(count):
            model.submit(prompt_len, output_len, tenant=tenant)
        for _ in range(num_steps):
            step_and_look()
    while len(model.waiting) > 1 or model.rows:
        step_and_look()


def two_tenants(policy):
    """A flood of 300 requests, and a tenant that sends its first of 50 a moment later; four rows."""
    model = Model(policy, max_rows=4, weights=WEIGHTS)
    for _ in range(300):
        model.submit(MAX_PROMPT_LEN, MAX_OUTPUT_LEN, tenant="flood")
    model.step()
    quiet = [model.submit(20, 10, tenant="quiet") for _ in range(50)]
    widest = Widest()
    while waits(model, "flood") and waits(model, "quiet"):
        widest.look(model, "flood", "quiet")
        model.step()
    model.run()
    return widest.value, model.started_s[quiet[0].rid] - model.arrived_s[quiet[0].rid]


def test_nobody_starves_behind_a_flood():
    """Service may differ by 2 U = 520. Under fcfs it differs by all that the flood has brought."""
    assert bound(4) == 260
    assert two_tenants("fcfs") == (
        32_312,
        1875,
    )  # difference of service, seconds until the first of 50 starts
    assert two_tenants("fair") == (220, 25)


def test_the_least_served_comes_first_and_outputs_count_twice():
    """Equal token counts: who generates more is served less often."""
    model = Model("fair", max_rows=1, weights=WEIGHTS)
    for _ in range(100):
        model.submit(20, 1, tenant="reads")
        model.submit(1, 20, tenant="writes")
    while waits(model, "reads") and waits(model, "writes"):
        model.step()

    started = [req.tenant for req in model.order_of_start]
    assert 1.8 <= started.count("reads") / started.count("writes") <= 2.0  # 22 and 41 per request


def test_who_comes_back_cannot_use_what_it_did_not_use():
    """After 30 requests of the other one it gets every second turn, not the next 30."""
    model = Model("fair", max_rows=1, weights=WEIGHTS)
    model.submit(8, 2, tenant="a")
    for _ in range(60):
        model.submit(8, 2, tenant="b")
    model.run_until(lambda: len(model.order_of_start) == 31)
    for _ in range(20):
        model.submit(8, 2, tenant="a")
    model.run()

    later = [req.tenant for req in model.order_of_start[31:51]]
    assert later.count("a") == 10


def test_who_was_served_more_cannot_wash_it_off_by_a_pause():
    """Its long answer has cost 58 when it pauses. When it is back, the other one gets 60 first: five requests of 12."""
    model = Model("fair", max_rows=1, weights=WEIGHTS)
    model.submit(8, 25, tenant="greedy")
    model.step()
    for _ in range(30):
        model.submit(8, 2, tenant="modest")
    model.run_until(lambda: len(model.order_of_start) == 2)
    model.submit(8, 2, tenant="greedy")
    model.run()

    assert [req.tenant for req in model.order_of_start[:7]] == ["greedy", *["modest"] * 5, "greedy"]


def test_cached_prefixes_are_free():
    model = Model("fair", max_rows=1, weights=WEIGHTS)
    for _ in range(40):
        model.cache(model.submit(40, 2, tenant="cached"), 9)  # 36 of 40 tokens
        model.submit(40, 2, tenant="computed")
    while waits(model, "cached") and waits(model, "computed"):
        model.step()

    started = [req.tenant for req in model.order_of_start]
    assert started.count("cached") >= 5 * started.count("computed")  # 8 and 44 per request


def test_within_a_tenant_it_is_first_come_first_served():
    model = Model("fair", max_rows=2)
    reqs = [model.submit(8, 2) for _ in range(5)]
    model.run()

    assert model.order_of_start == reqs


@pytest.mark.parametrize("name", ["fair", "round-robin"])
def test_nobody_overtakes_who_lacks_memory(name):
    """A prompt of half the memory among small ones that keep coming: fcfs with look-ahead starts them first."""
    overtaken = {}
    for policy in ("fcfs", name):
        model = Model(policy, max_rows=8, kv_tokens=80, tenant_quantum=16)
        for _ in range(3):
            model.submit(10, 6, tenant="small")
            model.step()
        large = model.submit(40, 2, tenant="large")
        for _ in range(60):
            model.submit(10, 6, tenant="small")
            model.step()
        model.run()
        overtaken[policy] = sum(req.seq > large.seq for req in model.order_of_start[: position(model, large)])

    assert overtaken["fcfs"] > 40
    assert overtaken[name] == 0


def position(model, req):
    return model.order_of_start.index(req)


def test_who_may_not_start_is_no_way_round_the_others():
    """A request that waits for its adapter holds the smallest counter at 0. A newcomer must not begin there, too."""
    model = Model("fair", max_rows=1, weights=WEIGHTS)
    model.stuck.add(model.submit(8, 2, tenant="stuck").seq)
    for _ in range(200):
        model.submit(40, 10, tenant="old")
    model.run_until(lambda: len(model.order_of_start) == 45)
    for _ in range(60):
        model.submit(40, 10, tenant="new")
    model.run_until(lambda: len(model.order_of_start) == 85)

    assert [req.tenant for req in model.order_of_start[45:]].count("new") == 20


def test_who_could_not_start_saves_nothing_up():
    """When its adapter is free its requests take turns with the others, and do not come all at once."""
    model = Model("fair", max_rows=1, weights=WEIGHTS)
    stuck = [model.submit(40, 10, tenant="stuck") for _ in range(30)]
    model.stuck.update(req.seq for req in stuck)
    for _ in range(200):
        model.submit(40, 10, tenant="old")
    model.run_until(lambda: len(model.order_of_start) == 45)
    model.stuck.clear()
    model.run_until(lambda: len(model.order_of_start) == 65)

    assert [req.tenant for req in model.order_of_start[45:]].count("stuck") in (10, 11)


def test_the_number_of_idle_tenants_remembered_is_bounded():
    model = Model("fair", max_rows=100)
    for number in range(MAX_IDLE_TENANTS + 100):
        model.submit(1, 1, tenant=f"tenant {number}")
    model.run()

    assert len(model.policy._counters) == MAX_IDLE_TENANTS
    assert not model.policy._queues


def test_a_pass_that_admits_many_of_one_tenant_counts_all_of_them():
    """Alone it gets five rows at once. Who comes then is lifted to what it had at its last admission, not before."""
    model = Model("fair", max_rows=5, weights=WEIGHTS)
    for _ in range(5):
        model.submit(MAX_PROMPT_LEN, MAX_OUTPUT_LEN, tenant="a")
    model.step()
    for tenant in "ba":
        model.submit(MAX_PROMPT_LEN, MAX_OUTPUT_LEN, tenant=tenant)

    model.run_until(lambda: len(model.ended_s) > 0)

    ahead = model.policy._counters["a"] - model.policy._counters["b"]
    assert ahead == bound(5)  # tight: the largest difference there can be


def test_tenants_that_come_and_go_leave_nothing_behind():
    model = Model("fair", max_rows=1, weights=WEIGHTS)
    for _ in range(1000):
        model.submit(1, 1, tenant="a")
        model.submit(1, 3, tenant="b")
        model.run()

    assert len(model.policy._backlog._heap) < 100


@pytest.mark.parametrize("name", ["fair", "round-robin"])
def test_work_on_images_is_charged_once(name):
    """Encoding costs what the prompt tokens cost that take as long; after a retraction it is free like all the rest."""
    model = Model(name, max_rows=1, tenant_quantum=10)
    req = model.submit(8, 4, tenant="a")
    model.step()
    counters = model.policy._counters if name == "fair" else model.policy._balances
    before = counters["a"]
    model.policy.encoded(req, 7)
    assert abs(counters["a"] - before) == 7
    model.retract(req)
    model.step()
    before = counters["a"]
    model.policy.encoded(req, 7)
    assert counters["a"] == before
