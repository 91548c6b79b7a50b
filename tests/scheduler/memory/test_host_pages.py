"""Tests of `HostPages`: its equation, which page goes, and that a step writes to no page that it reads."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduler.memory.host_pages import LEAST_COPY_PAGES, HostPages


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def terms(host: HostPages) -> tuple[int, int, int]:
    assert host.num_free + host.num_swapped + host.num_cached == host.num_pages
    return host.num_free, host.num_swapped, host.num_cached


def test_evicted_pages_are_copied_out_once_and_stay_when_they_return() -> None:
    host = HostPages(4, keeps_evicted=True)
    host.cache(keys("a", "b"), ids(7, 8))
    outs, ins = host.take_copies()
    assert sorted(outs[:, 0].tolist()) == [7, 8] and not ins.size
    assert terms(host) == (2, 0, 2) and host.count_cached(keys("a", "b", "c")) == 2

    host.admit(2, keys("a", "b"))
    host.copy_in(keys("a", "b"), ids(3, 4))
    outs_again, ins = host.take_copies()
    where = dict(outs.tolist())
    assert ins.tolist() == [[where[7], 3], [where[8], 4]] and not outs_again.size
    host.cache(keys("a", "b"), ids(3, 4))
    assert not host.has_outs and terms(host) == (2, 0, 2)


def test_the_end_of_a_prefix_goes_before_its_beginning_and_before_it_what_was_used_less() -> None:
    host = HostPages(4, keeps_evicted=True)
    host.cache(keys("x"), ids(1))
    host.cache(keys("a", "b", "c"), ids(2, 3, 4))
    host.cache(keys("y"), ids(5))
    assert [host.count_cached(keys(name)) for name in "xabcy"] == [0, 1, 1, 1, 1]
    host.cache(keys("z"), ids(6))
    assert [host.count_cached(keys(name)) for name in "abcyz"] == [1, 1, 0, 1, 1]
    outs, _ = host.take_copies()
    assert len(set(outs[:, 1].tolist())) == len(outs) == 4, "no page is copied to twice in a step"


def test_swapped_requests_take_the_place_of_cached_pages_but_not_of_those_that_the_step_reads() -> None:
    host = HostPages(3, keeps_evicted=True)
    host.cache(keys("a", "b", "c"), ids(1, 2, 3))
    host.take_copies()
    host.admit(1, keys("c"))
    host.copy_in(keys("c"), ids(9))
    assert host.num_available == 2
    swapped = host.swap_out(ids(4, 5))
    outs, ins = host.take_copies()
    assert not set(outs[:, 1].tolist()) & set(ins[:, 0].tolist())
    assert terms(host) == (0, 2, 1) and host.count_cached(keys("c")) == 1
    host.cache(keys("d"), ids(6))
    assert host.count_cached(keys("d")) == 1 and terms(host) == (0, 2, 1)
    host.free(swapped)
    assert terms(host) == (2, 0, 1)


def test_a_swapped_page_that_returns_is_not_written_before_that_step() -> None:
    host = HostPages(2, keeps_evicted=True)
    swapped = host.swap_out(ids(4, 5))
    assert host.is_leaving(swapped)
    host.take_copies()
    assert not host.is_leaving(swapped)
    host.admit(1)
    host.swap_in(swapped[1:], ids(6))
    host.free(swapped)
    assert terms(host) == (1, 1, 0)
    host.cache(keys("a", "b"), ids(7, 8))
    assert host.count_cached(keys("a")) == 1 and host.count_cached(keys("b")) == 0, (
        "the first pages count most"
    )
    outs, ins = host.take_copies()
    assert outs.tolist() == [[7, int(swapped[0])]] and ins.tolist() == [[int(swapped[1]), 6]]
    assert terms(host) == (1, 0, 1)


def test_a_page_that_is_freed_before_its_copy_is_planned_is_not_copied() -> None:
    host = HostPages(2, keeps_evicted=True)
    swapped = host.swap_out(ids(4))
    host.cache(keys("a"), ids(5))
    host.free(swapped)
    host.forget(keys("a", "unknown"))
    assert not host.has_outs and terms(host) == (2, 0, 0)
    host.cache(keys("a"), ids(5))
    assert (host.flush(), host.has_outs, *terms(host)) == (1, False, 2, 0, 0)


def test_a_step_has_a_budget_of_copies_and_a_single_request_may_exceed_it() -> None:
    host = HostPages(100, keeps_evicted=True, page_bytes=1 << 30)
    count = LEAST_COPY_PAGES + 2
    host.cache([bytes([number]) for number in range(count)], np.arange(1, count + 1, dtype=np.int32))
    assert host.count_cached(bytes([number]) for number in range(count)) == LEAST_COPY_PAGES
    host.cache(keys("more"), ids(50))
    assert host.num_cached == LEAST_COPY_PAGES
    host.take_copies()
    assert host.may_copy_in(50)
    host.admit(LEAST_COPY_PAGES - 1)
    assert host.may_copy_in(0) and host.may_copy_in(1) and not host.may_copy_in(2)
    host.take_copies()
    host.admit(50)
    assert host.may_copy_in(0) and not host.may_copy_in(1)


def test_the_rest_of_a_prefix_takes_the_place_of_others_and_not_of_its_beginning() -> None:
    host = HostPages(4, keeps_evicted=True)
    host.cache(keys("a", "b", "c"), ids(1, 2, 3))
    host.cache(keys("x"), ids(4))
    host.take_copies()
    host.cache(keys("a", "b", "c", "d"), ids(5, 6, 7, 8))
    outs, _ = host.take_copies()
    assert outs[:, 0].tolist() == [8] and host.count_cached(keys("a", "b", "c", "d")) == 4
    host.cache(keys("s", "t", "u", "v", "w", "x"), ids(1, 2, 3, 4, 5, 6))
    outs, _ = host.take_copies()
    assert sorted(outs[:, 0].tolist()) == [1, 2, 3, 4], "more than the host has"
    assert host.cached_pages_total == 4 + 1 + 4


def test_beside_a_swapped_request_above_the_budget_nothing_evicted_is_copied() -> None:
    host = HostPages(100, keeps_evicted=True)
    host.cache(keys("a"), ids(90))
    host.take_copies()
    host.swap_out(np.arange(1, LEAST_COPY_PAGES + 4, dtype=np.int32))
    host.cache(keys("a", "b", "c", "d", "e"), ids(90, 91, 92, 93, 94))
    assert terms(host) == (100 - LEAST_COPY_PAGES - 4, LEAST_COPY_PAGES + 3, 1)
    host.cache(keys("a"), ids(90))
    outs, _ = host.take_copies()
    assert len(outs) == LEAST_COPY_PAGES + 3


@pytest.mark.parametrize(("page_bytes", "most"), [(0, 16), (1 << 20, 256), (1 << 30, 16)])
def test_the_budget_is_in_bytes(page_bytes: int, most: int) -> None:
    assert HostPages(1, page_bytes=page_bytes).max_copies == most


def test_without_pages_nothing_is_kept() -> None:
    assert not HostPages(0, keeps_evicted=True).keeps_evicted
    assert not HostPages(9).keeps_evicted
