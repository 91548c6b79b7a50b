"""`StopMatcher`: finds stop strings in text that arrives in pieces, and holds back text that may become one.

The match that is complete first wins, and among matches that end at the same character the longest. This rule depends
neither on the split into pieces nor on the order of the stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """The result of a piece of text.

    Attributes:
        text: final text, without a part of a possible stop string; with a match, all of the text up to it.
        matched: the stop string that is now complete.
    """

    text: str
    matched: str | None = None


class StopMatcher:
    """The stop strings of one request.

    Each string is followed with the algorithm of Knuth, Morris and Pratt, so that the cost per character does not
    depend on the length or self-similarity of the strings: clients choose them, and must not be able to slow down
    other requests.
    """

    __slots__ = ("_first_chars", "_held", "_include_match", "_strings")

    def __init__(self, strings: Sequence[str], *, include_match: bool = False) -> None:
        """Start at the beginning of a text.

        Args:
            strings: each not empty.
            include_match: the matched string is part of the released text.
        """
        self._strings = [_Follower(string) for string in strings]
        self._first_chars = frozenset(string[0] for string in strings)
        self._include_match = include_match
        self._held = ""

    def push(self, text: str) -> Released:
        """Process the next piece of text. After a match the matcher must not be used again."""
        if not self._held and self._first_chars.isdisjoint(text):
            return Released(text)
        text, start = self._held + text, len(self._held)
        for end in range(start, len(text)):
            matched = self._advance(text[end])
            if matched is not None:
                keep = end + 1 if self._include_match else end + 1 - len(matched)
                self._held = ""
                return Released(text[:keep], matched)
        held_len = max((follower.num_matched for follower in self._strings), default=0)
        self._held = text[len(text) - held_len :]
        return Released(text[: len(text) - held_len])

    def flush(self) -> str:
        """The text held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Advance all strings by one character; returns the longest that is complete."""
        longest: str | None = None
        for follower in self._strings:
            if follower.advance(char) and (longest is None or len(follower.string) > len(longest)):
                longest = follower.string
        return longest


class _Follower:
    """Number of characters of one string that the text ends with."""

    __slots__ = ("_borders", "num_matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._borders = _borders(string)

    def advance(self, char: str) -> bool:
        """Process one character; whether the string is complete."""
        num_matched = self.num_matched
        while num_matched and self.string[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        if self.string[num_matched] == char:
            num_matched += 1
        self.num_matched = num_matched
        return num_matched == len(self.string)


def _borders(string: str) -> list[int]:
    """For each prefix of the string, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        if string[i] == string[length]:
            length += 1
        borders[i] = length
    return borders
