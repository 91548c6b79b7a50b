"""Tests of `scheduler/memory/req_to_token_pool.py`."""

import numpy as np

from engine.scheduler.memory.req_to_token_pool import ReqToTokenPool


def int32(*values):
    return np.array(values, dtype=np.int32)


def test_slots_follow_the_pages_of_a_row():
    pool = ReqToTokenPool(num_rows=2, max_pages_per_row=4, page_size=4)
    row = pool.allocate()
    pool.append_pages(row, int32(7))
    pool.append_pages(row, int32(3, 9))

    assert pool.slots(row, 2, 10).tolist() == [30, 31, 12, 13, 14, 15, 36, 37]
    assert pool.slots_at(int32(row, row), int32(0, 11)).tolist() == [28, 39]


def test_a_released_row_can_be_had_again_and_is_told_once():
    pool = ReqToTokenPool(num_rows=2, max_pages_per_row=4, page_size=1)
    first, second = pool.allocate(), pool.allocate()
    assert {first, second} == {0, 1} and pool.num_free_rows == 0
    epoch = int(pool.epoch[first])

    pool.append_pages(first, int32(5, 6))
    pool.release(first)

    assert pool.num_free_rows == 1 and pool.num_pages[first] == 0
    assert pool.epoch[first] == epoch + 1
    assert pool.allocate() == first
    assert pool.take_left_rows() == [first]
    assert pool.take_left_rows() == []
