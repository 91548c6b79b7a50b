"""The seconds that the prompts of one step may take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.step_size.step_target import UNLIMITED, PromptTime


def cost_s(time: PromptTime, start: int, length: int) -> float:
    return time.token_s * length + time.pair_s * sum(start + k + 1 for k in range(length))


@given(
    given_s=st.floats(1e-3, 0.2),
    token_s=st.floats(1e-4, 1e-2),
    pair_s=st.floats(0, 1e-6),
    start=st.integers(0, 10_000),
)
def test_the_longest_chunk_that_fits_is_found(given_s, token_s, pair_s, start):
    time = PromptTime(given_s, token_s=token_s, pair_s=pair_s, page_size=1)
    time.spend(0, 0)  # the first page is free

    most = time.most_tokens(start)

    assert cost_s(time, start, most) <= given_s * (1 + 1e-9)
    assert cost_s(time, start, most + 1) > given_s * (1 - 1e-9)
    time.spend(start, most)
    assert time.left_s >= -1e-9 * given_s


def test_the_first_chunk_may_take_a_page_and_the_next_may_not():
    time = PromptTime(0.001, token_s=0.01, pair_s=0.0, page_size=16)
    assert (time.most_tokens(5), time.is_spent) == (16, False)
    time.spend(5, 11)
    assert (time.most_tokens(0), time.is_spent) == (0, True)


def test_without_a_limit_nothing_is_ever_spent():
    time = PromptTime.unlimited()
    time.spend(0, 1_000_000)
    assert time.most_tokens(0) == UNLIMITED and not time.is_spent


def test_costs_that_are_nothing_are_no_limit():
    time = PromptTime(0.01, token_s=0.0, pair_s=1e-9, page_size=16)
    assert time.most_tokens(0) == 4471  # m (m + 1) / 2 = 1e7


def test_a_part_of_a_tile_that_takes_longer_than_there_is_does_not_count():
    time = PromptTime(1.0, token_s=0.01, pair_s=0.0, page_size=1, pixel_s=0.4, tiles_s=0.9)
    assert time.has_tiles(2, 0, 10) and not time.has_tiles(2, 0, 11), "the tokens that read the rows count"
    assert time.most_pixels() == pytest.approx(2.25)
    time.spend_pixels(3)
    assert (time.left_s, time.tiles_s) == (1.0, 0.9)
    time.spend_pixels(2)
    assert [time.left_s, time.tiles_s] == pytest.approx([0.2, 0.1])
