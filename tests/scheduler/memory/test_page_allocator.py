"""Tests of `scheduler/memory/page_allocator.py`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.memory.page_allocator import PageAllocator, PageError


def test_hands_out_every_page_once_and_never_the_dummy_page():
    allocator = PageAllocator(10)

    pages = np.concatenate([allocator.allocate(4), allocator.allocate(0), allocator.allocate(6)])

    assert sorted(pages.tolist()) == list(range(1, 11))
    assert allocator.num_free == 0


def test_a_request_that_grows_page_by_page_beside_others_gets_neighbors():
    allocator = PageAllocator(64)
    prompts = [allocator.allocate(3) for _ in range(4)]

    pages = np.stack(prompts)
    for _ in range(5):
        pages = np.column_stack([pages, allocator.allocate_after(pages[:, -1])])

    assert (np.diff(pages) == 1).all()
    assert np.unique(pages).size == pages.size


def test_a_prompt_that_grows_goes_on_behind_its_last_page_and_then_in_whole_extents():
    allocator = PageAllocator(64)
    first, other = allocator.allocate(3), allocator.allocate(3)

    more = allocator.allocate(12, after=int(first[-1]))

    assert more.tolist()[:5] == (first[-1] + np.arange(1, 6)).tolist()
    assert np.diff(more[5:]).tolist() == [1] * 6
    assert not np.intersect1d(more, other).size


def test_what_was_left_for_growth_is_handed_out_when_nothing_else_is_free():
    allocator = PageAllocator(16)
    first, second = allocator.allocate(2), allocator.allocate(2)

    rest = allocator.allocate(12)

    assert sorted([*first, *second, *rest]) == list(range(1, 17))


def test_two_requests_that_share_their_last_page_get_different_ones_behind_it():
    allocator = PageAllocator(16)
    shared = allocator.allocate(2)

    pages = allocator.allocate_after(np.array([shared[-1], shared[-1]], dtype=np.int32))

    assert pages[0] == shared[-1] + 1
    assert pages[1] not in (*shared, pages[0])


def test_a_request_that_needs_several_pages_at_once_gets_them_behind_each_other():
    allocator = PageAllocator(64)
    first, other = allocator.allocate(6), allocator.allocate(3)

    pages = allocator.allocate_after(np.array([first[-1], 0, 0, 0, other[-1], 0], dtype=np.int32))

    assert pages[:2].tolist() == [first[-1] + 1, first[-1] + 2]
    assert pages[3] == pages[2] + 1
    assert pages[4:].tolist() == [other[-1] + 1, other[-1] + 2]


@pytest.mark.parametrize("page", [9, 17, 24, 40])
def test_a_page_that_is_not_in_use_or_none_has_nothing_behind_it(page):
    allocator = PageAllocator(24)
    taken = allocator.allocate(2)

    pages = [*taken, *allocator.allocate_after(np.array([page], dtype=np.int32)), *allocator.allocate(21)]

    assert sorted(pages) == list(range(1, 25))


def test_the_extents_that_came_free_last_are_the_first_ones_used_again_and_in_order():
    allocator = PageAllocator(64)
    pages = allocator.allocate(40)
    allocator.free(pages[8:32])

    assert allocator.allocate(24).tolist() == pages[8:32].tolist()


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.sampled_from(["free", "take", "grow"]), st.integers(0, 1000)), max_size=60),
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
            after = int(held[-1][-1]) if held and number % 2 else 0
            held.append(allocator.allocate(1 + number % allocator.num_free, after))
        elif action == "grow":
            growing = min(len(held), allocator.num_free)
            last = np.array([pages[-1] + number % 3 for pages in held[:growing]], dtype=np.int32)
            for n, page in enumerate(allocator.allocate_after(last)):
                held[n] = np.append(held[n], page)
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

    with pytest.raises(PageError, match="2 pages requested, 1 of 3 are free"):
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
