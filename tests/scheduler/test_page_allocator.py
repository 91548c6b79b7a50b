"""Tests of `scheduler/page_allocator.py`."""

import numpy as np
import pytest

from engine.scheduler.page_allocator import PageAllocator, PageError


def test_hands_out_every_page_once_and_never_the_dummy_page():
    allocator = PageAllocator(10)

    pages = np.concatenate([allocator.allocate(4), allocator.allocate(0), allocator.allocate(6)])

    assert sorted(pages.tolist()) == list(range(1, 11))
    assert allocator.num_free == 0


def test_the_last_page_freed_is_the_first_one_used_again():
    allocator = PageAllocator(8)
    pages = allocator.allocate(5)
    allocator.free(pages[1:3])

    assert sorted(allocator.allocate(2).tolist()) == sorted(pages[1:3].tolist())


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

    with pytest.raises(PageError, match="2 pages wanted, 1 of 3 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_a_page_given_back_twice_is_an_error():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.free(pages)

    with pytest.raises(PageError, match="given back twice"):
        allocator.free(pages[:1])


@pytest.mark.parametrize("page", [0, 4, -1])
def test_what_is_no_page_cannot_be_given_back(page):
    allocator = PageAllocator(3)
    allocator.allocate(3)

    with pytest.raises(PageError, match=r"must lie in \[1, 3\]"):
        allocator.free(np.array([page], dtype=np.int32))
