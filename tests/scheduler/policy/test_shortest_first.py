"""Tests of sjf and srtf, and of the estimate of lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.messages import FinishKind
from engine.scheduler.policy.key_orders import MAX_TENANTS, LengthEstimate, TenantAverage
from tests.selection import examples

from .model import Model, make_req

MIX = [50, 5, 40, 5, 5, 60, 5, 5]
"""Tokens of output: three long answers among short ones."""


def mean_completion_s(policy, lens, *, max_rows=1, **config):
    model = Model(policy, max_rows=max_rows, length_ageing=0.0, **config)
    for output_len in lens:
        model.submit(10, output_len)
    return model.run()


def test_sjf_lowers_the_mean_completion_time():
    assert mean_completion_s("fcfs", MIX) == pytest.approx(114.375)
    assert mean_completion_s("sjf", MIX) == pytest.approx(53.75)
    assert mean_completion_s("lof", MIX) == pytest.approx(143.125)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_no_order_of_requests_has_a_lower_mean_than_sjf(lens):
    """With one row, and lengths known."""
    best = mean_completion_s("sjf", lens)

    assert all(best <= mean_completion_s(policy, lens) for policy in ("fcfs", "lof", "random"))


def test_sjf_looks_at_prompt_and_output():
    model = Model("sjf", length_ageing=0.0)
    reqs = [model.submit(100, 10), model.submit(5, 60), model.submit(60, 4)]

    assert model.order() == [reqs[2], reqs[1], reqs[0]]


def test_srtf_lets_one_that_is_nearly_done_come_back_first():
    """80 of 100 tokens are done when it is retracted: 20 are left, which is less than the 50 of those that wait."""
    ended_s = {}
    for policy in ("sjf", "srtf"):
        model = Model(policy, max_rows=1, length_ageing=0.0)
        long = model.submit(10, 100)
        for _ in range(80):
            model.step()
        for _ in range(5):
            model.submit(10, 40)
        model.retract(long)
        model.run()
        ended_s[policy] = model.ended_s[long.rid] - 100.0

    assert ended_s == {"sjf": 300, "srtf": 100}


def test_srtf_counts_the_prompt_of_one_that_has_generated_nothing():
    model = Model("srtf", length_ageing=0.0, step_tokens=8)
    cut = model.submit(40, 10)
    model.step()
    other = model.submit(20, 10)
    model.retract(cut)

    assert model.order() == [other, cut]


@given(
    ageing=st.sampled_from([1.0, 10.0, 100.0]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=20
    ),
    name=st.sampled_from(["sjf", "srtf"]),
)
def test_only_those_that_come_soon_after_a_request_overtake_it(ageing, arrivals, name):
    """The reason why nobody starves: `length / ageing` seconds after its arrival the door behind it is closed."""
    model = Model(name, length_ageing=ageing)
    for wait_s, prompt_len, output_len in arrivals:
        model.now_s += wait_s
        model.submit(prompt_len, output_len)

    order = model.order()

    for place, req in enumerate(order):
        length = req.prompt_len + req.max_new_tokens
        assert all(before.arrival_s <= req.arrival_s + length / ageing for before in order[:place])


# ---------------------------------------------------------------- estimates


def test_a_tenants_average_finds_the_short_ones_though_all_allow_the_same():
    """Both tenants allow 4,096 tokens; one gets 5, the other 50. Known after one answer each."""
    mean_s = {}
    for estimate in ("max-tokens", "tenant-average"):
        model = Model("sjf", max_rows=1, length_ageing=0.0, length_estimate=estimate)
        for tenant, output_len in [("brief", 5), ("long", 50)]:
            model.submit(10, output_len, max_new_tokens=4096, tenant=tenant)
        model.run()
        model.ended_s.clear()
        for tenant, output_len in [("long", 50), ("brief", 5)] * 4:
            model.submit(10, output_len, max_new_tokens=4096, tenant=tenant)
        mean_s[estimate] = model.run()

    assert mean_s == {"max-tokens": pytest.approx(135.0), "tenant-average": pytest.approx(78.75)}


def finished(output_len, tenant="t"):
    req = make_req(1, max_new_tokens=4096, tenant=tenant)
    req.output_len = output_len
    return req


def test_an_unknown_tenant_is_expected_to_use_what_it_allows():
    assert TenantAverage().output_len(make_req(1, max_new_tokens=70)) == 70
    assert LengthEstimate().output_len(make_req(1, max_new_tokens=70)) == 70


def test_the_average_follows_and_never_exceeds_the_limit():
    estimate = TenantAverage()
    for _ in range(3):
        estimate.finished(finished(100), FinishKind.STOP)
    assert estimate.output_len(make_req(1, max_new_tokens=4096, tenant="t")) == 100
    assert estimate.output_len(make_req(1, max_new_tokens=30, tenant="t")) == 30

    estimate.finished(finished(200), FinishKind.STOP)

    assert estimate.output_len(make_req(1, max_new_tokens=4096, tenant="t")) == 110


def test_one_that_said_nothing_teaches_nothing():
    estimate = TenantAverage()
    estimate.finished(finished(0), FinishKind.STOP)

    assert estimate.output_len(make_req(1, max_new_tokens=70, tenant="t")) == 70


@pytest.mark.parametrize("kind", [FinishKind.ABORT, FinishKind.ERROR])
def test_one_that_was_cut_off_teaches_nothing(kind):
    """A client that leaves after three tokens would make its tenant's long answers look short."""
    estimate = TenantAverage()
    estimate.finished(finished(100), FinishKind.LENGTH)
    estimate.finished(finished(3), kind)

    assert estimate.output_len(make_req(1, max_new_tokens=4096, tenant="t")) == 100


def test_an_estimate_that_was_exceeded_is_dropped():
    estimate = TenantAverage()
    estimate.finished(finished(10), FinishKind.STOP)
    grown = finished(10)

    assert estimate.output_len(grown) == 4096


def test_the_number_of_tenants_remembered_is_bounded():
    estimate = TenantAverage()
    for number in range(MAX_TENANTS + 1):
        estimate.finished(finished(10, tenant=f"t{number}"), FinishKind.STOP)

    assert estimate.output_len(make_req(1, max_new_tokens=70, tenant="t0")) == 70
    assert estimate.output_len(make_req(1, max_new_tokens=70, tenant="t1")) == 10
