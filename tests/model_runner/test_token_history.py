"""Penalties of DRY: the figures of llama.cpp's own tests, and a search without cleverness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model_runner.token_history import TokenHistory
from engine.runtime.sampling_params import SamplingParams


def history(tokens: list[int], breakers: tuple[tuple[int, ...], ...] = (), **options: Any) -> TokenHistory:
    params = SamplingParams(dry_breaker_ids=breakers, **options)
    return TokenHistory(params, np.array(tokens, dtype=np.int32), len(tokens))


# tests/test-sampling.cpp of llama.cpp: the last tokens, base, allowed length and breakers of `test_dry`; the penalties
# that give its probabilities.
@pytest.mark.parametrize(
    ("tokens", "multiplier", "allowed", "breakers", "expected"),
    [
        ([0, 1], 1.0, 2, (), {}),
        ([0, 1, 2, 0, 1], 1.0, 2, (), {2: 1.0}),
        ([0, 1, 3, 4, 0, 1], 1.0, 2, ((3,),), {}),
        ([0, 1, 2, 0, 1], 2.0, 2, (), {2: 2.0}),
        ([0, 1, 2, 3, 4, 0, 1], 1.0, 4, (), {}),
    ],
)
def test_figures_of_llama_cpp(tokens, multiplier, allowed, breakers, expected):
    made = history(
        tokens,
        breakers,
        dry_multiplier=multiplier,
        dry_base=1.1,
        dry_allowed_length=allowed,
        dry_penalty_last_n=len(tokens),
    )
    assert made.penalties() == pytest.approx(expected)


def by_search(tokens: list[int], window: int, allowed: int, breakers: list[list[int]]) -> dict[int, int]:
    """The length of the longest repetition that each token would continue."""
    tokens = tokens[-window:]
    limit = len(tokens)
    for start in range(len(tokens) - 1, -1, -1):
        found = [b for b in breakers if tokens[start : start + len(b)] == b]
        if found:
            limit = len(tokens) - start - max(map(len, found))
            break
    longest: dict[int, int] = {}
    if len(tokens) <= allowed or limit < allowed:
        return longest
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        length, following = min(length, limit), tokens[end + 1]
        if length >= allowed and [following] not in breakers:
            longest[following] = max(length, longest.get(following, 0))
    return longest


few = st.integers(0, 3)


@given(
    st.lists(few, min_size=1, max_size=40),
    st.lists(few, max_size=40),
    st.integers(1, 12),
    st.integers(0, 4),
    st.lists(st.lists(few, min_size=1, max_size=3), max_size=4),
)
def test_same_as_a_search_for_every_token(prompt, output, window, allowed, breakers):
    made = history(
        prompt,
        tuple(map(tuple, breakers)),
        dry_multiplier=0.5,
        dry_base=2.0,
        dry_allowed_length=allowed,
        dry_penalty_last_n=window,
    )
    for count in range(len(output) + 1):
        if count:
            made.append(output[count - 1])
        lengths = by_search(prompt + output[:count], window, allowed, breakers)
        assert made.penalties() == {token: 0.5 * 2.0 ** (n - allowed) for token, n in lengths.items()}
    assert made.length == len(prompt) + len(output)


def test_the_longest_of_the_breakers_at_a_place_counts_once_it_is_complete():
    made = history([1, 2, 5, 6, 1, 2, 5], ((5,), (5, 6)), dry_multiplier=1.0, dry_allowed_length=1)
    made.append(6)
    assert made.penalties() == {}
    made.append(1)
    assert made.penalties() == {2: 1.0}


def test_a_long_repetition_has_the_largest_finite_penalty():
    made = history([7] * 4000, dry_multiplier=1.0, dry_base=4.0)
    (penalty,) = made.penalties().values()
    assert penalty == 4.0**63
    assert np.isfinite(np.float32(penalty))


def test_the_end_of_a_bad_word_is_forbidden_after_its_beginning_in_the_output():
    params = SamplingParams(bad_words_ids=((5,), (1, 2), (1, 2, 3)))
    made = TokenHistory(params, np.array([1, 2, 1], dtype=np.int32), prompt_len=2)
    assert made.changes() == {2: -np.inf}  # (5,) depends on nothing before it; the prompt does not count
    made.append(2)
    assert made.changes() == {3: -np.inf}
    made.append(7)
    assert made.changes() == {}
    assert TokenHistory(params, np.array([7, 1], dtype=np.int32), prompt_len=2).changes() == {}
    assert SamplingParams(bad_words_ids=((5,),)).depends_on_output is False
    assert params.depends_on_output


@pytest.mark.parametrize("tokens", [[7] * 4096, [7, 8, 9] * 1365, [*range(2048)] * 2])
def test_a_long_prompt_is_as_its_tokens_one_by_one(tokens):
    """The window is prepared at once: token by token it took 60 ms, during which no other request ran."""
    options: dict[str, Any] = {"dry_multiplier": 1.0, "dry_base": 1.01}
    breakers = tuple((7,) * n + (8,) for n in range(2, 40))
    at_once, one_by_one = history(tokens, breakers, **options), history(tokens[:-200], breakers, **options)
    for token in tokens[-200:]:
        one_by_one.append(token)
    assert at_once.penalties() == one_by_one.penalties() != {}
    at_once.append(8)
    one_by_one.append(8)
    assert at_once.penalties() == one_by_one.penalties()
