"""What decode steps cost is measured, and forgotten in time."""

from __future__ import annotations

import pytest

from engine.scheduler.speculation.step_costs import MAX_TOKENS, StepCosts


def test_unknown_numbers_lie_between_known_ones():
    costs = StepCosts()
    costs.measured(2, 0.010, plain=True)
    costs.measured(10, 0.018, plain=False)
    assert costs.seconds(2, 10).tolist() == pytest.approx([0.010 + 0.008 * (n / 8) ** 2 for n in range(9)])
    assert costs.seconds(11, MAX_TOKENS).tolist() == pytest.approx([0.018] * 54), "tried, so that it is known"
    assert costs.seconds(1, 1)[0] == pytest.approx(0.010)


def test_a_larger_step_bounds_the_smaller_ones():
    costs = StepCosts()
    for num_tokens, seconds in ((1, 0.01), (4, 0.029), (9, 0.012)):
        costs.measured(num_tokens, seconds, plain=num_tokens == 1)
    assert costs.seconds(4, 9).tolist() == pytest.approx([0.012] * 6)


def test_one_disturbed_step_says_little():
    costs = StepCosts()
    costs.measured(1, 0.01, plain=True)
    costs.measured(9, 5.0, plain=False)
    assert costs.seconds(9, 9)[0] == pytest.approx(0.03)
    costs.measured(1, 7.0, plain=True)
    assert costs.seconds(1, 1)[0] == pytest.approx(0.01)
    for _ in range(4):
        costs.measured(9, 0.09, plain=False)
    assert costs.seconds(9, 9)[0] == pytest.approx(0.09, rel=0.1), "what is dear for good is soon seen to be"


def test_a_plain_step_stands_for_batches_of_about_its_size_for_a_while():
    costs = StepCosts()
    assert not costs.knows_plain(8)
    costs.measured(8, 0.01, plain=False)
    assert not costs.knows_plain(8)
    costs.measured(8, 0.01, plain=True)
    assert [num for num in range(1, 65) if costs.knows_plain(num)] == [7, 8, 9, 10]
    for _ in range(600):
        costs.measured(12, 0.01, plain=False)
    assert not costs.knows_plain(8)


def test_the_work_between_steps_counts_once_for_a_multi_step_decode():
    costs = StepCosts()
    for _ in range(20):
        costs.measured(1, 0.010, plain=True, between_s=0.004, num_rounds=4)
        costs.measured(2, 0.012, plain=False, between_s=0.004)
    assert costs.intervals(1, 2).tolist() == pytest.approx([0.011, 0.016])
    costs.measured(1, 0.010, plain=True, between_s=3.0, num_rounds=4)
    assert costs.intervals(1, 2).tolist() == pytest.approx([0.011, 0.016]), "a pause says nothing"
