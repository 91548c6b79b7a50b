"""Tests of the round-robin policy."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection import examples

from .model import Model
from .service import Widest, waits


def test_tenants_take_turns_of_a_quantum():
    """Each request is 8 + 2 tokens; a quantum of 20 serves two, of 40 four."""
    for quantum, per_turn in [(1, 1), (10, 1), (20, 2), (40, 4)]:
        model = Model("round-robin", max_rows=1, tenant_quantum=quantum)
        for tenant in "aaaaaaaabbbbbbbbcccccccc":
            model.submit(8, 2, tenant=tenant)
        model.run()

        started = [req.tenant for req in model.order_of_start]
        assert started == list(("a" * per_turn + "b" * per_turn + "c" * per_turn) * (8 // per_turn))


def test_the_order_of_one_pass_counts_with_what_it_admits():
    """Many rows are free: a pass that admits all of them takes turns, too."""
    model = Model("round-robin", max_rows=12, tenant_quantum=16)
    for tenant in "aaaaaabbbbbb":
        model.submit(8, 2, tenant=tenant)

    admitted = model.step()

    assert [req.tenant for req in admitted] == list("aabbaabbaabb")


def test_within_a_tenant_it_is_first_come_first_served():
    model = Model("round-robin", max_rows=1, tenant_quantum=10)
    reqs = [model.submit(8, 2, tenant=tenant) for tenant in "aababb"]
    model.run()

    for tenant in "ab":
        started = [req.seq for req in model.order_of_start if req.tenant == tenant]
        assert started == [req.seq for req in reqs if req.tenant == tenant]


def test_tenants_are_served_equally_whatever_the_size_of_their_requests():
    """One sends 100 tokens at a time, one 10. Under fcfs the first gets ten times as much."""
    served = {}
    for policy in ("fcfs", "round-robin"):
        model = Model(policy, max_rows=2, tenant_quantum=50)
        for _ in range(200):
            model.submit(80, 20, tenant="large")
            model.submit(8, 2, tenant="small")
        while waits(model, "large") and waits(model, "small"):
            model.step()
        served[policy] = round(model.served["large"] / model.served["small"], 1)

    assert served == {"fcfs": 10.0, "round-robin": 1.0}


@settings(max_examples=examples(100), deadline=None)
@given(
    quantum=st.sampled_from([1, 50, 400]),
    max_rows=st.integers(1, 5),
    step_tokens=st.sampled_from([16, 1000]),
    bursts=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 60),
            st.integers(1, 25),
            st.integers(1, 9),
            st.integers(0, 6),
        ),
        min_size=1,
        max_size=40,
    ),
    kv_tokens=st.sampled_from([85, 150, 1000]),
)
def test_the_service_of_two_that_wait_differs_by_a_constant(
    quantum, max_rows, step_tokens, bursts, kv_tokens
):
    """Any bursts, chunked prompts, little memory, and a tenant whose only request may never start."""
    model = Model(
        "round-robin", max_rows=max_rows, step_tokens=step_tokens, tenant_quantum=quantum, kv_tokens=kv_tokens
    )
    model.stuck.add(model.submit(1, 1, tenant="stuck").seq)
    widest = {pair: Widest() for pair in ("ab", "bc", "ac")}

    def step_and_look():
        model.step()
        for pair, each in widest.items():
            each.look(model, *pair)
            assert each.value <= 3 * quantum + 2 * (60 + max_rows * 25)

    for tenant, prompt_len, output_len, count, num_steps in bursts:
        for _ in range(count):
            model.submit(prompt_len, output_len, tenant=tenant)
        for _ in range(num_steps):
            step_and_look()
    while len(model.waiting) > 1 or model.rows:
        step_and_look()


def test_a_large_prompt_is_not_overtaken_for_as_long_as_small_ones_fit():
    """Prompts of 400 and of 60, memory for one large one: looking ahead, the small tenant got 3,600 tokens more."""
    model = Model("round-robin", max_rows=4, tenant_quantum=16, kv_tokens=440)
    widest = Widest()
    for number in range(600):
        while sum(req.tenant == "small" for req in model.waiting) < 12:
            model.submit(60, 3 + number % 5 * 2, tenant="small")
        while sum(req.tenant == "large" for req in model.waiting) < 2:
            model.submit(400, 2, tenant="large")
        model.step()
        widest.look(model, "small", "large")

    assert widest.value <= 3 * 16 + 2 * (400 + 4 * 11)


def test_a_turn_of_requests_that_may_not_start_costs_the_others_nothing():
    """Its holder is stuck. Who is served meanwhile gets no debt from it: a newcomer finds equals."""
    model = Model("round-robin", max_rows=1, tenant_quantum=20)
    stuck = [model.submit(8, 2, tenant="stuck") for _ in range(30)]
    model.stuck.update(req.seq for req in stuck)
    for _ in range(200):
        model.submit(8, 2, tenant="old")
    model.run_until(lambda: len(model.order_of_start) == 40)
    for _ in range(60):
        model.submit(8, 2, tenant="new")
    model.run_until(lambda: len(model.order_of_start) == 80)
    assert [req.tenant for req in model.order_of_start[40:]].count("new") == 20

    model.stuck.clear()
    model.run_until(lambda: len(model.order_of_start) == 110)
    assert [req.tenant for req in model.order_of_start[80:]].count("stuck") == 10


def test_a_debt_is_paid_with_the_next_turns():
    """A prompt of 100 costs ten quanta of 10: the other tenant has its turns meanwhile."""
    model = Model("round-robin", max_rows=1, tenant_quantum=10)
    model.submit(99, 1, tenant="a")
    model.submit(99, 1, tenant="a")
    for _ in range(30):
        model.submit(9, 1, tenant="b")
    model.run()

    assert [req.tenant for req in model.order_of_start] == ["a", *"bbbbbbbbbb", "a", *"bbbbbbbbbbbbbbbbbbbb"]


def test_who_is_idle_saves_nothing_up_and_is_forgotten():
    model = Model("round-robin", max_rows=1, tenant_quantum=100)
    model.submit(8, 2, tenant="a")
    for _ in range(60):
        model.submit(8, 2, tenant="b")
    model.run_until(lambda: sum(req.tenant == "b" for req in model.order_of_start) == 20)
    assert set(model.policy._queues) == {"b"}  # the one look inside: nothing else shows what is remembered

    for _ in range(30):
        model.submit(8, 2, tenant="a")
    start = len(model.order_of_start)
    model.run()

    later = "".join(req.tenant for req in model.order_of_start[start:])
    rest_of_turn = len(later) - len(later.lstrip("b"))
    assert rest_of_turn < 10
    assert later[rest_of_turn : rest_of_turn + 30] == "a" * 10 + "b" * 10 + "a" * 10
    assert not model.policy._queues
    assert not model.policy._balances


def test_what_is_lost_by_retraction_is_not_charged_again():
    """A request that was retracted ten times has cost its tenant what it would have cost undisturbed."""
    model = Model("round-robin", max_rows=1, tenant_quantum=100)
    unlucky = model.submit(50, 20, tenant="a")
    for _ in range(10):
        model.step()
        model.retract(unlucky)
    model.run_until(lambda: not model.rows and not model.waiting)

    model.submit(8, 2, tenant="a")
    model.submit(8, 2, tenant="b")
    assert model.served == {"a": 70}
    assert model.step()[0].tenant == "a"
