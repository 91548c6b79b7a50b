"""Tests of `scheduler/new_token_ratio.py`: the constants are SGLang's."""

import pytest

from engine.scheduler.new_token_ratio import NewTokenRatio


def test_falls_from_its_start_to_a_share_of_it_in_600_steps():
    ratio = NewTokenRatio(1.0)
    assert ratio.current == pytest.approx(0.7)

    ratio.after_decode()
    assert ratio.current == pytest.approx(0.7 - (0.7 - 0.098) / 600)

    for _ in range(1000):
        ratio.after_decode()
    assert ratio.current == pytest.approx(0.098)


def test_conservativeness_scales_it_up_to_everything():
    assert NewTokenRatio(0.5).current == pytest.approx(0.35)
    assert NewTokenRatio(3.0).current == 1.0


def test_a_retraction_raises_it_to_what_the_remaining_have_generated():
    ratio = NewTokenRatio(0.1)

    ratio.after_retraction(num_remaining=4, generated_tokens=120, max_new_tokens=999)
    assert ratio.current == pytest.approx((120 + 80) / 1000)

    ratio.after_retraction(num_remaining=4, generated_tokens=990, max_new_tokens=1000)
    assert ratio.current == 1.0

    ratio.reset()
    assert ratio.current == pytest.approx(0.07)


def test_a_retraction_never_lowers_it():
    """Ten young requests with high limits: the estimate would be below the minimum."""
    ratio = NewTokenRatio(1.0)
    ratio.after_decode()
    before = ratio.current

    ratio.after_retraction(num_remaining=10, generated_tokens=50, max_new_tokens=10 * 4000)

    assert ratio.current == before
