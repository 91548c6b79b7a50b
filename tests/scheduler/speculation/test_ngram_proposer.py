"""Guesses at how a text goes on: the index finds what a search through the whole text finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.speculation.ngram_proposer import MIN_MATCH, HitRates, NgramIndex, NgramProposer
from engine.scheduler.speculation.suffix_index import MAX_MATCH

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def searched(tokens: list[int]) -> dict[int, int]:
    """Every place behind which the text's last tokens stood, and how many of them."""
    found = {}
    for place in range(MIN_MATCH, len(tokens)):
        length = 0
        while length < min(place, MAX_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            found[place] = length
    return found


@given(begin=TEXTS, more=st.lists(st.integers(0, 3), max_size=40))
def test_the_longest_of_the_newest_matches(begin, more):
    index, tokens = NgramIndex(ids(begin)), list(begin)
    for token in [None, *more]:
        if token is not None:
            index.append(token)
            tokens.append(token)
        found = searched(tokens)
        newest = sorted(found, reverse=True)[:16]
        match = index.find()
        if not found:
            assert match is None
            continue
        assert match is not None
        assert match.length == max(found[place] for place in newest)
        assert match.source == next(place for place in newest if found[place] == match.length)
    assert list(index.tokens) == tokens == list(NgramIndex(ids(tokens)).tokens)


@given(begin=TEXTS, more=TEXTS, cut=st.integers(0, 60))
def test_a_text_given_in_parts_is_the_same_text(begin, more, cut):
    proposer = NgramProposer(ids(begin), HitRates())
    proposer.observe(more[:cut])
    proposer.observe(more[cut:])
    at_once = NgramProposer(ids(begin), HitRates())
    at_once.observe(more)
    assert len(proposer) == len(at_once) == len(begin) + len(more)
    assert proposer.match_len == at_once.match_len
    assert proposer.chances(4) == at_once.chances(4)
    if proposer.match_len:
        assert proposer.drafts(4) == at_once.drafts(4)


def test_what_followed_before_is_proposed():
    proposer = NgramProposer(ids([5, 1, 2, 3, 4, 9, 8, 1, 2]), HitRates())
    assert proposer.drafts(3) == [3, 4, 9]
    proposer.observe([3])
    assert proposer.match_len == 3
    assert proposer.drafts(2) == [4, 9]
    proposer.observe([7])
    assert proposer.match_len == 0
    assert proposer.chances(3) == []


def test_a_circle_goes_on():
    proposer = NgramProposer(ids([4, 4, 4]), HitRates())
    assert proposer.drafts(5) == [4] * 5
    proposer = NgramProposer(ids([1, 2, 3, 1, 2]), HitRates())
    assert proposer.drafts(7) == [3, 1, 2, 3, 1, 2, 3]


def test_chances_follow_what_happens():
    circle, noise = [1, 2, 3, 4, 5] * 30, [1, 2, 7, 3, 1, 2, 8, 9, 1, 2, 3, 5]
    copying, drifting = NgramProposer(ids(circle[:9]), HitRates()), NgramProposer(ids(noise), HitRates())
    copying.observe(circle[9:])
    for token in range(20, 80):
        drifting.observe([1, 2, token])
    drifting.observe([1, 2])
    assert min(copying.chances(8)) > 0.5 > 0.05 > drifting.chances(1)[0]
    assert copying.chances(8) == sorted(copying.chances(8), reverse=True)


def test_a_newcomer_knows_what_others_have_shown():
    shared = HitRates()
    before = NgramProposer(ids([1, 2, 3, 1, 2]), shared).chances(1)
    for _ in range(20):
        NgramProposer(ids([1, 2, 3, 1, 2]), shared).observe([9])
    assert NgramProposer(ids([1, 2, 3, 1, 2]), shared).chances(1) < before
