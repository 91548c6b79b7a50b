"""Tests of `scheduler/memory/pages.py`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.memory.pages import LedgerError, PageAllocator


def test_hands_out_every_page_once_and_never_the_dummy_page():
    allocator = PageAllocator(10)

    pages = np.concatenate([allocator.allocate(4), allocator.allocate(0), allocator.allocate(6)])

    assert sorted(pages.tolist()) == list(range(1, 11))
    assert allocator.num_free == 0


def test_the_pages_that_were_freed_last_are_used_first_and_in_order():
    allocator = PageAllocator(64)
    pages = allocator.allocate(40)
    allocator.free(pages[8:32])

    assert allocator.allocate(24).tolist() == pages[8:32].tolist()


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.sampled_from(["free", "take"]), st.integers(0, 1000)), max_size=60),
)
def test_every_page_is_free_or_handed_out_once(num_pages, actions):
    allocator = PageAllocator(num_pages)
    held: list[np.ndarray] = []
    for action, number in actions:
        if action == "free" and held:
            pages = held.pop(number % len(held))
            kept = number % (len(pages) + 1)
            allocator.free(pages[kept:])
            held += [pages[:kept]] if kept else []
        elif action == "take" and allocator.num_free:
            held.append(allocator.allocate(1 + number % allocator.num_free))
        out = [int(page) for pages in held for page in pages]
        assert sorted([*out, *allocator.free_pages().tolist()]) == list(range(1, num_pages + 1))
        assert allocator.num_free == num_pages - len(out)
        assert allocator.highest_used >= max(out, default=0)


@pytest.mark.parametrize("seed", range(20))
def test_no_page_behind_the_highest_used_one_was_ever_handed_out(seed):
    rng, allocator = np.random.default_rng(seed), PageAllocator(30)
    held: list[np.ndarray] = []
    highest = 0
    for _ in range(60):
        assert allocator.highest_used == highest
        if held and rng.random() < 0.5:
            allocator.free(held.pop(int(rng.integers(len(held)))))
        elif allocator.num_free:
            held.append(allocator.allocate(int(rng.integers(1, allocator.num_free // 2 + 2))))
            highest = max(highest, int(held[-1].max()))


def test_asking_for_more_than_is_free_is_an_error_and_takes_nothing():
    allocator = PageAllocator(3)
    allocator.allocate(2)

    with pytest.raises(LedgerError, match="2 pages requested, 1 of 3 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_a_page_given_back_twice_is_an_error():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.free(pages)

    with pytest.raises(LedgerError, match="given back twice"):
        allocator.free(pages[:1])


def test_a_page_given_back_twice_is_an_error_while_others_are_in_use():
    allocator = PageAllocator(3)
    pages = allocator.allocate(3)
    allocator.free(pages[:1])

    with pytest.raises(LedgerError, match=r"pages \[1\] are given back twice"):
        allocator.free(pages[:2])
    assert allocator.free_pages().tolist() == [1]


@pytest.mark.parametrize("page", [0, 4, -1])
def test_what_is_no_page_cannot_be_given_back(page):
    allocator = PageAllocator(3)
    allocator.allocate(3)

    with pytest.raises(LedgerError, match=r"must lie in \[1, 3\]"):
        allocator.free(np.array([page], dtype=np.int32))
