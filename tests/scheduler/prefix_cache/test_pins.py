"""Tests of `scheduler/prefix_cache/pins.py`, through `RadixCache`."""

import pytest

from engine.runtime.messages import Call, PinDone, PinPrefix
from engine.scheduler.prefix_cache.eviction import EvictionClass
from tests.scheduler.prefix_cache.cached_pool import CachedPool, ids

FOREVER = 1e9


def make(num_pages=16, quota=8, policy="lru", page_size=1):
    return CachedPool(num_pages, policy, page_size=page_size, max_pinned_pages=quota)


def sound(pool):
    """Whether the cache agrees with itself; nothing is leased."""
    assert pool.cache.verify([]) == []
    return True


def test_a_pinned_prefix_survives_a_scan():
    pool = make()
    pool.serve([1, 2, 3, 4])
    assert pool.cache.pin("", ids(1, 2, 3, 4), FOREVER) == 4

    for number in range(100, 150):
        pool.serve([number] * 4)

    assert pool.serve([1, 2, 3, 4]) == 4
    assert pool.cache.pinned_pages == 4
    assert sound(pool)


def test_a_pin_never_blocks():
    """The pool is all pins; a request that needs all of it gets it, and the pins are over."""
    pool = make(num_pages=8, quota=8)
    pool.serve([1, 2, 3, 4])
    pool.serve([5, 6, 7, 8])
    pool.cache.pin("", ids(1, 2, 3, 4), FOREVER)
    pool.cache.pin("", ids(5, 6, 7, 8), FOREVER)
    assert (pool.cache.evictable_pages, pool.cache.pinned_pages) == (8, 8)

    pool.serve([20, 21, 22, 23, 24, 25, 26, 27])

    assert pool.cached([20, 21, 22, 23, 24, 25, 26, 27]) == 8
    assert (pool.cache.pinned_pages, len(pool.cache._pins)) == (0, 0)
    assert sound(pool)


def test_pinned_pages_go_only_when_no_others_are_left():
    pool = make(num_pages=8)
    pool.serve([1, 2, 3, 4])
    pool.cache.pin("", ids(1, 2), FOREVER)
    pool.serve([5, 6])  # more recent than all of the above

    assert len(pool.cache.evict(4)) == 4
    assert (pool.cached([1, 2, 3, 4]), pool.cached([5, 6])) == (2, 0)
    assert len(pool.cache.evict(1)) == 1
    assert (pool.cached([1, 2]), pool.cache.pinned_pages) == (1, 1)
    assert sound(pool)


def test_the_policy_orders_the_pinned_among_themselves():
    pool = make()
    for token in (1, 2, 3):
        pool.serve([token])
        pool.cache.pin("", ids(token), FOREVER)
    pool.serve([1])

    pool.cache.evict(2)

    assert [pool.cached([token]) for token in (1, 2, 3)] == [1, 0, 0]


def test_the_beginning_is_pinned_first_and_the_quota_holds():
    pool = make(quota=3)
    pool.serve([1, 2, 3, 4, 5, 6])

    assert pool.cache.pin("", ids(1, 2, 3, 4, 5, 6), FOREVER) == 3
    assert pool.cache.pin("", ids(1, 2, 3, 4), FOREVER) == 3  # shares the same pages: none of its own left
    assert pool.cache.pinned_pages == 3
    assert sound(pool)
    pool.cache.evict(3)
    assert pool.cached([1, 2, 3, 4, 5, 6]) == 3


def test_shared_pages_count_once():
    pool = make(quota=6)
    pool.serve([1, 2, 3, 4, 5])
    pool.serve([1, 2, 3, 8, 9])

    assert pool.cache.pin("", ids(1, 2, 3, 4, 5), FOREVER) == 5
    assert pool.cache.pin("", ids(1, 2, 3, 8, 9), FOREVER) == 4
    assert pool.cache.pinned_pages == 6

    pool.cache.unpin("", ids(1, 2, 3, 4, 5))
    assert pool.cache.pinned_pages == 4
    assert sound(pool)


def test_only_what_is_cached_now_is_pinned_until_it_is_pinned_again():
    pool = make()
    pool.serve([1, 2])
    assert pool.cache.pin("", ids(1, 2, 3, 4), FOREVER) == 2
    pool.serve([1, 2, 3, 4])

    assert pool.cache.pinned_pages == 2
    assert pool.cache.pin("", ids(1, 2, 3, 4), FOREVER) == 4
    assert pool.cache.pinned_pages == 4
    pool.cache.unpin("", ids(1, 2, 3, 4))  # one pin, renewed: ending it once is enough
    assert pool.cache.pinned_pages == 0


def test_nothing_is_pinned_that_is_not_there_or_without_quota():
    pool = make(quota=0)
    pool.serve([1, 2])
    assert pool.cache.pin("", ids(1, 2), FOREVER) == 0

    pool = make(page_size=2)
    pool.serve([1, 2])
    assert pool.cache.pin("", ids(9, 9), FOREVER) == 0
    assert pool.cache.pin("other", ids(1, 2), FOREVER) == 0
    assert pool.cache.pin("", ids(1), FOREVER) == 0
    assert pool.cache.pin("", b"", FOREVER) == 0
    assert (pool.cache.pinned_pages, len(pool.cache._pins)) == (0, 0)


def test_pins_of_two_namespaces_are_two():
    pool = make()
    pool.serve([1, 2], "a")
    pool.serve([1, 2], "b")
    pool.cache.pin("a", ids(1, 2), FOREVER)
    pool.cache.pin("b", ids(1, 2), FOREVER)

    pool.cache.unpin("a", ids(1, 2))

    assert pool.cache.pinned_pages == 2
    pool.cache.evict(2)
    assert (pool.cached([1, 2], "a"), pool.cached([1, 2], "b")) == (0, 2)


def test_a_pin_ends_at_its_time():
    pool = make()
    pool.serve([1, 2])
    pool.serve([1, 2, 3])
    pool.cache.pin("", ids(1, 2), 10.0)
    pool.cache.pin("", ids(1, 2, 3), 20.0)

    pool.cache.expire_pins(9.999)
    assert pool.cache.pinned_pages == 3
    pool.cache.expire_pins(10.0)
    assert pool.cache.pinned_pages == 3  # the longer one covers them still
    pool.cache.expire_pins(20.0)
    assert (pool.cache.pinned_pages, len(pool.cache._pins)) == (0, 0)
    assert sound(pool)


@pytest.mark.parametrize(("second", "at_15", "at_25"), [(30.0, 2, 2), (20.0, 2, 0), (5.0, 0, 0)])
def test_pinning_again_sets_a_new_end(second, at_15, at_25):
    pool = make()
    pool.serve([1, 2])
    pool.cache.pin("", ids(1, 2), 10.0)
    pool.cache.pin("", ids(1, 2), second)

    pool.cache.expire_pins(15.0)
    assert pool.cache.pinned_pages == at_15
    pool.cache.expire_pins(25.0)
    assert pool.cache.pinned_pages == at_25


def test_an_ended_pin_is_evicted_in_its_turn_again():
    pool = make()
    pool.serve([1, 2])
    pool.cache.pin("", ids(1, 2), 10.0)
    pool.serve([3, 4])
    pool.cache.expire_pins(10.0)

    pool.cache.evict(2)

    assert (pool.cached([1, 2]), pool.cached([3, 4])) == (0, 2)


def test_a_pinned_prefix_can_be_leased_split_and_released():
    pool = make()
    pool.serve([1, 2, 3, 4])
    pool.cache.pin("", ids(1, 2, 3, 4), FOREVER)
    _, lease = pool.begin([1, 2, 9])

    assert pool.cache.verify([lease]) == []
    assert (pool.cache.pinned_pages, pool.cache.locked_pages) == (4, 3)
    pool.cache.release(lease)
    assert sound(pool)
    assert len(pool.cache.evict(1)) == 1
    assert pool.cached([1, 2, 3, 4]) == 4


def test_forgetting_bad_pages_drops_their_pin():
    pool = make()
    pool.serve([1, 2])
    _, lease = pool.begin([1, 2, 3, 4])
    pool.cache.pin("", ids(1, 2, 3, 4), FOREVER)

    assert sorted(pool.cache.forget(lease).tolist()) == [1, 2, 3, 4]

    assert (pool.cache.pinned_pages, len(pool.cache._pins)) == (0, 0)
    assert sound(pool)


def test_a_flush_drops_pinned_pages_but_not_leased_ones():
    pool = make()
    pool.serve([1, 2, 3, 4])
    pool.cache.pin("", ids(1, 2, 3, 4), FOREVER)
    _, lease = pool.begin([1, 2])

    assert len(pool.cache.evict(pool.cache.evictable_pages)) == 2

    assert (pool.cache.pinned_pages, pool.cache.locked_pages) == (2, 2)
    pool.cache.release(lease)
    assert len(pool.cache.evict(pool.cache.evictable_pages)) == 2
    assert (pool.cache.pinned_pages, len(pool.cache._pins)) == (0, 0)
    assert sound(pool)


def test_there_are_no_more_pins_than_pages_in_the_quota():
    """Prompts that share one cached page could otherwise make pins without end."""
    pool = make(quota=4)
    pool.serve([1])

    pinned = [pool.cache.pin("", ids(1, 100 + number), FOREVER) for number in range(10)]

    assert pinned == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert pool.cache.pin("", ids(1, 100), FOREVER) == 1  # renewing is no new pin
    assert sound(pool)


def test_pinning_and_unpinning_for_ever_leaves_nothing_behind():
    pool = make(quota=4)
    for number in range(1000):
        pool.serve([number % 7, 1])
        pool.cache.pin("", ids(number % 7, 1), FOREVER + number)
        pool.cache.evict(number % 3)
        pool.cache.unpin("", ids(number % 7, 1))
        pool.free = list(range(1, 17))

    assert pool.cache.pinned_pages == 0
    assert sound(pool)
    assert len(pool.cache._pins._expiries) <= 80
    assert len(pool.cache._queue._heaps[EvictionClass.PROMISED].entries) <= 80
    assert len(pool.cache._queue._heaps[EvictionClass.ORDINARY].entries) <= 80


def test_a_pin_too_many_is_told_apart_from_a_prefix_that_is_not_cached(make_scheduler):
    harness = make_scheduler(
        num_pages=64, page_size=4, cache={"pin_fraction": 0.05}
    )  # three pages, three pins
    harness.submit("a", prompt=list(range(1, 41)))
    harness.run_until_idle()

    def pin(last: int) -> PinDone:
        request = PinPrefix(ids(1, 2, 3, 4, last, last, last, last), 100.0)
        harness.scheduler.handle(Call(last, request), harness.now_s)
        (done,) = harness.scheduler.take_call_answers()
        assert isinstance(done.answer, PinDone)
        return done.answer

    first = [pin(last) for last in (50, 51, 52)]
    fourth = pin(53)

    assert [(done.pinned_tokens, done.reason[:30]) for done in first] == [
        (4, "only what is cached can be pin")
    ] * 3
    assert (fourth.pinned_tokens, fourth.reason) == (
        0,
        "there are 3 pins, and no more are allowed than the quota has pages; wait, unpin others, or raise "
        "--pin-fraction",
    )


def pinned_tokens(harness, token_ids, ttl_s, salt=""):
    harness.scheduler.handle(Call(1, PinPrefix(token_ids, ttl_s, salt)), harness.now_s)
    (done,) = harness.scheduler.take_call_answers()
    assert isinstance(done.answer, PinDone)
    return done.answer.pinned_tokens


def test_a_pin_ends_when_its_time_is_over(make_scheduler):
    harness = make_scheduler(num_pages=64, page_size=4)
    harness.submit("a", prompt=list(range(1, 41)))
    harness.run_until_idle()
    assert pinned_tokens(harness, ids(*range(1, 41)), 5.0) == 40
    assert harness.scheduler.report(0.0).pinned_tokens == 40

    harness.now_s += 4.0
    harness.step()
    assert harness.scheduler.report(0.0).pinned_tokens == 40
    harness.now_s += 2.0
    harness.step()

    assert harness.scheduler.report(0.0).pinned_tokens == 0


def test_a_pin_keeps_what_was_cached_under_its_own_salt(make_scheduler):
    harness = make_scheduler(num_pages=64, page_size=4)
    harness.submit("a", prompt=list(range(1, 41)), extra_key="salt")
    harness.run_until_idle()

    assert pinned_tokens(harness, ids(*range(1, 41)), 5.0) == 0
    assert pinned_tokens(harness, ids(*range(1, 41)), 5.0, "salt") == 40


# ---------------------------------------------------------------- promises


def promise(pool, tokens, until_s=FOREVER, tenant="t"):
    return pool.cache.pin("", ids(*tokens), until_s, tenant)


def test_the_promise_of_a_newer_turn_replaces_that_of_the_turn_before():
    pool = make()
    for length in (2, 4, 6):
        pool.serve(list(range(1, length + 1)))
        assert promise(pool, range(1, length + 1), until_s=float(length)) == length
        assert (len(pool.cache._pins), pool.cache.pinned_pages) == (1, length)
    promise(pool, [1, 2], until_s=9.0)  # a branch of the same beginning that lasts longer
    promise(pool, [1, 2, 3], until_s=8.0)

    assert len(pool.cache._pins) == 3
    pool.cache.expire_pins(8.0)
    assert pool.cache.pinned_pages == 2
    assert sound(pool)


def test_a_promise_takes_no_pin_of_a_client_away():
    pool = make(quota=4)
    pool.serve([1, 2, 3, 4])
    pool.serve([5, 6, 7, 8])
    pool.cache.pin("", ids(1, 2), FOREVER)
    promise(pool, [1, 2, 3, 4])
    assert promise(pool, [5, 6, 7, 8]) == 2  # that of before made room, the pin did not
    pool.cache.unpin("", ids(5, 6, 7, 8))  # no pin of a client

    assert (len(pool.cache._pins), pool.cache.pinned_pages) == (2, 4)
    assert pool.cache.pin("", ids(5, 6, 7, 8), FOREVER) == 4 - 2
    assert sound(pool)


def test_in_a_full_quota_the_promise_that_ends_first_makes_room():
    pool = make(quota=4)
    for token, until_s in ((10, 3.0), (20, 1.0), (30, 2.0)):
        pool.serve([token, token + 1])
        assert promise(pool, [token, token + 1], until_s) == 2
    pool.serve([40] * 8)
    pool.serve([50] * 4)

    assert [pool.cached([token, token + 1]) for token in (10, 20, 30)] == [2, 0, 2]
    assert sound(pool)


def test_many_promises_of_one_tenant_leave_the_others_their_share():
    pool = make(num_pages=200, quota=40)
    for number in range(100):
        pool.serve([1000 + number] * 2)
        promise(pool, [1000 + number] * 2, until_s=100.0 + number, tenant="flood")
    assert pool.cache.pinned_pages == 40
    for number in range(12):
        pool.serve([number + 1] * 2)
        assert promise(pool, [number + 1] * 2, until_s=10.0, tenant="other") == 2
    for number in range(100, 200):
        pool.serve([1000 + number] * 2)
        promise(pool, [1000 + number] * 2, until_s=100.0 + number, tenant="flood")

    sizes = {"flood": 0, "other": 0}
    for pin in pool.cache._pins._by_key.values():
        sizes[pin.tenant] += pin.num_pages
    assert sizes == {"flood": 20, "other": 20}
    assert sound(pool)


def test_a_request_keeps_its_prompt_for_its_time_and_one_that_comes_once_goes_first(make_scheduler):
    harness = make_scheduler(num_pages=32, page_size=4, cache={"pin_fraction": 0.5})
    prompt = list(range(1, 41))
    harness.submit("kept", prompt=prompt, message={"keep_s": 5.0}, max_new_tokens=2)
    harness.submit("once", prompt=[50] * 40, message={"keep_s": 0.0}, max_new_tokens=2)
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).pinned_tokens == 40
    for number in range(20):
        harness.submit(prompt=[100 + number] * 40, max_new_tokens=2)
        harness.run_until_idle()
    turn = harness.submit(prompt=[*prompt, 9], max_new_tokens=1)
    harness.run_until_idle()

    assert harness.answers[turn].rows[-1].usage.cached_tokens == 40
    harness.now_s += 6.0
    harness.submit(prompt=[9] * 4, max_new_tokens=1)
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).pinned_tokens == 0
