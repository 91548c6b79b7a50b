from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.detokenizer.stop_strings import StopMatcher

ALPHABET = "ab"  # few letters make many overlaps


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[i:j] for i, j in pairwise(bounds)]


def expected(text: str, strings: list[str]) -> tuple[str, str | None]:
    """By the definition: the first end of any stop string, the longest of those that end there."""
    for end in range(len(text) + 1):
        complete = [s for s in strings if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """The texts released piece by piece, and the match; flushed at the end when there is none."""
    texts = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        texts.append(text)
        if matched is not None:
            return texts, matched
    return [*texts, matcher.flush()], None


@given(
    text=st.text(ALPHABET, max_size=40),
    strings=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=10),
)
@example(text="aabaab", strings=["aabaaa", "baab"], cuts=[1, 2, 3, 4, 5])
def test_result_is_that_of_the_whole_text_however_it_is_cut(text, strings, cuts):
    texts, matched = run(StopMatcher(strings), pieces_of(text, cuts))

    assert ("".join(texts), matched) == expected(text, strings)


@given(
    text=st.text(ALPHABET, max_size=40),
    strings=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_holds_back_no_more_than_a_possible_beginning(text, strings):
    matcher = StopMatcher(strings)
    released = ""
    for i, char in enumerate(text):
        new, matched = matcher.push(char)
        released += new
        if matched is not None:
            return
        held = text[len(released) : i + 1]
        possible = [n for n in range(i + 2) if any(s.startswith(text[i + 1 - n : i + 1]) for s in strings)]
        assert len(held) == max(possible)


@pytest.mark.parametrize(
    ("pieces", "texts", "matched"),
    [
        pytest.param(["one E", "ND two"], ["one ", ""], "END", id="split across chunks"),
        pytest.param(["one END two"], ["one "], "END", id="inside one chunk"),
        pytest.param(["one EN", "O two"], ["one ", "ENO two", ""], None, id="only begun"),
        pytest.param(["one EN"], ["one ", "EN"], None, id="flushed at the end"),
        pytest.param(["E", "E", "E", "ND"], ["", "E", "E", ""], "END", id="begins again"),
    ],
)
def test_releases_text_as_soon_as_it_is_certain(pieces, texts, matched):
    assert run(StopMatcher(["END"]), pieces) == (texts, matched)


def test_the_first_to_be_complete_wins_over_the_first_in_the_list():
    assert run(StopMatcher(["two three", "wo"]), ["one two three"]) == (["one t"], "wo")


@pytest.mark.parametrize("strings", [["END", "ND", "D"], ["D", "ND", "END"]])
def test_of_those_complete_at_the_same_character_the_longest_wins(strings):
    assert run(StopMatcher(strings), ["one E", "ND two"]) == (["one ", ""], "END")


def test_include_match_keeps_the_string_and_nothing_behind_it():
    assert run(StopMatcher(["END"], include_match=True), ["one E", "ND two"]) == (["one ", "END"], "END")


def test_a_hostile_string_costs_no_more_per_character():
    """A search that starts anew at every character would take some 200 million comparisons here."""
    string = "a" * 1023 + "b"
    matcher = StopMatcher([string])

    texts, matched = run(matcher, ["a" * 200_000, "b"])

    assert matched == string
    assert len("".join(texts)) == 200_000 - 1023
