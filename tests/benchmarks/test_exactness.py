"""`benchmarks/exactness.py`: divergence and agreement of next tokens."""

from __future__ import annotations

import math

import pytest

from benchmarks.exactness import COMPARED, divergence, row_of


def likely(**probabilities: float) -> dict[int, float]:
    return {ord(name): math.log(value) for name, value in probabilities.items()}


def test_divergence_is_that_of_the_compared_tokens_and_all_others():
    true, said = likely(a=0.5, b=0.25), likely(a=0.25, b=0.25)

    assert divergence(true, true) == 0
    assert divergence(true, said) == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5))


def test_a_token_that_a_side_does_not_return_counts_with_the_others():
    assert divergence(likely(a=0.5, b=0.25), likely(a=0.5, c=0.4)) == pytest.approx(0)


def test_only_the_likeliest_tokens_are_compared():
    true = {token: math.log(0.5**token) for token in range(1, COMPARED + 2)}
    said = true | {COMPARED + 1: math.log(1e-9)}

    assert divergence(true, said) == pytest.approx(0)


def test_positions_with_the_same_likeliest_token_are_counted():
    one, other = likely(a=0.6, b=0.3), likely(a=0.3, b=0.6)

    row = row_of("x", [one, other, one], [one, one, one])

    assert (row.agree, row.positions) == (2, 3)
    assert row.kl == pytest.approx(divergence(one, other) / 3)
