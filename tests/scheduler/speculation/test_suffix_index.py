"""The index of finished answers finds what a search through all of them finds, and keeps owners apart."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.speculation.ngram_proposer import MIN_MATCH, HitRates, NgramProposer
from engine.scheduler.speculation.suffix_index import MAX_MATCH, MAX_PLACES, SuffixIndex

LONG = 6
ANSWERS = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=30)), min_size=1, max_size=8
)


class Searched:
    """The same by search: every token of every answer with the tokens before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens: list[tuple[int, int]] = []  # owner, token; -1: a separator

    def add(self, owner: int, answer: list[int]) -> None:
        self.tokens += [(owner, token) for token in [-1, *answer[-(self.size - 1) :]]]

    def find(self, owner: int, last: list[int]) -> tuple[list[int], int] | None:
        """The tokens from the source on, and the length of the match."""
        first = max(0, len(self.tokens) - self.size)
        found = {}
        for place in range(first, len(self.tokens)):
            if self.tokens[place][0] != owner or self.tokens[place][1] == -1:
                continue
            length = 0
            while (
                length < min(len(last), place - first)
                and self.tokens[place - 1 - length][1] == last[-1 - length]
            ):
                length += 1
            found[place] = length
        for depth in (LONG, MIN_MATCH):
            places = sorted((place for place, length in found.items() if length >= depth), reverse=True)
            if places[:MAX_PLACES]:
                best = max(places[:MAX_PLACES], key=lambda place: (found[place], place))
                rest = [token for _, token in self.tokens[best:]]
                return rest[: rest.index(-1)] if -1 in rest else rest, found[best]
        return None


@given(
    answers=ANSWERS, size=st.sampled_from([1, 2, 7, 16, 400]), last=st.lists(st.integers(0, 2), max_size=40)
)
def test_it_finds_what_a_search_finds(answers, size, last):
    index, searched = SuffixIndex(size), Searched(size)
    for owner, answer in answers:
        index.add(owner, answer)
        searched.add(owner, answer)
        for text in (last[-MAX_MATCH:], answer[:9], answer[-3:]):
            for asker in (0, 1):
                match, expected = index.find(asker, text), searched.find(asker, text)
                if expected is None:
                    # A chain may end early, at an entry that was overwritten; it never has more.
                    assert match is None
                elif match is not None:
                    assert (index.following(match.source, 50), match.length) == expected
                else:
                    raise AssertionError(f"not found: {expected}")


def test_only_answers_of_the_same_owner_are_found():
    index = SuffixIndex(1000)
    owners = [
        SuffixIndex.owner_of(*each) for each in (("a", ""), ("b", ""), ("a", "salt"), ("", "asalt"), ("", ""))
    ]
    assert len(set(owners)) == 5
    index.add(owners[0], [1, 2, 3, 4])
    assert [index.find(owner, [1, 2]) is not None for owner in owners] == [True, False, False, False, False]
    before = index.find(owners[1], [1, 2])
    index.add(owners[1], [1, 2, 9])
    match = index.find(owners[0], [1, 2])
    assert before is None and match is not None and index.following(match.source, 5) == [3, 4]


def test_the_oldest_answer_is_overwritten():
    index = SuffixIndex(12)
    index.add(0, [1, 2, 3, 4, 5])
    first = index.find(0, [1, 2])
    assert first is not None and index.following(first.source, 2) == [3, 4]
    index.add(0, [6, 7, 8, 9, 10])
    index.add(0, [6, 7, 8, 9, 11])
    assert index.find(0, [1, 2]) is None
    assert index.following(first.source, 2) == []
    match = index.find(0, [8, 9])
    assert match is not None and index.following(match.source, 2) == [11]


def test_its_memory_is_bounded():
    """50 bytes per token of the ring, however many answers of however many owners there are."""
    tracemalloc.start()
    try:
        size = 1 << 14
        index, rng = SuffixIndex(size), np.random.default_rng(0)
        for owner in range(100):
            index.add(owner, rng.integers(0, 50_000, 500).tolist())
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 50 * size


def proposer(answers: list[list[int]], text: list[int], **fields: Any) -> NgramProposer:
    index = SuffixIndex(1000)
    for answer in answers:
        index.add(7, answer)
    return NgramProposer(np.array(text, dtype=np.int32), HitRates(), index, fields.get("owner", 7))


def test_an_answer_is_followed_to_its_end():
    following = proposer([[1, 2, 3, 4, 5, 6]], [9, 1, 2])
    assert len(following.chances(8)) == 4 and following.drafts(4) == [3, 4, 5, 6]
    following.observe([3, 4])
    assert following.drafts(2) == [5, 6] and following.match_len == 4
    following.observe([5, 6])
    assert following.chances(8) == []
    following.observe([1, 2])
    assert following.drafts(1) == [3]
    assert proposer([[1, 2, 3, 4, 5, 6]], [9, 1, 2], owner=8).chances(8) == []


def test_the_longer_match_is_followed():
    own = [1, 2, 3, 4, 8, 9, 1, 2, 3, 4]
    assert proposer([[3, 4, 5]], own).drafts(2) == [8, 9]
    assert proposer([[7, 1, 2, 3, 4, 5, 6]], [3, 4, 8, 7, 1, 2, 3, 4]).drafts(2) == [5, 6]
