"""`NgramProposer`: proposes the next tokens of a request from an earlier occurrence of its last tokens (prompt lookup).

It follows one earlier position of the text. While each new token equals the one that followed there, it advances; at
the first difference it looks for the longest match again (`ngram_index.py`). Every new token, drafted or not, shows
whether the proposal was correct. So a request with bad proposals costs only this comparison, and a request that begins
to copy is detected without drafts.

    text   ... the scheduler decides what runs next ... so the scheduler decides
                                  ▲ source: "what", "runs", "next" are the drafts                match_len: 3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..arrays import IntArray
from .ngram_index import MAX_MATCH, MIN_MATCH, NgramIndex

_FIRST_RATES: Final = (0.3, 0.55, 0.8, 0.9)
"""Initial hit rates of the token after a match of 2, 4, 8, 16 or more tokens."""
_OWN_WEIGHT: Final = 1 / 12
_SHARED_WEIGHT: Final = 1 / 256


class HitRates:
    """How often the token after a match was correct, by the match's length in powers of two; moving averages."""

    def __init__(self, rates: Iterable[float] = _FIRST_RATES, weight: float = _SHARED_WEIGHT) -> None:
        self._rates = list(rates)
        self._weight = weight

    def of(self, match_len: int) -> float:
        """The probability that the next token is correct."""
        return self._rates[_class_of(match_len)]

    def learn(self, match_len: int, *, hit: bool) -> None:
        """Count one token after a match; `hit`: it was correct."""
        idx = _class_of(match_len)
        self._rates[idx] += self._weight * (hit - self._rates[idx])

    def copy(self, weight: float) -> HitRates:
        """A copy with the same rates that learns with another weight."""
        return HitRates(self._rates, weight)


class NgramProposer:
    """See the module.

    Attributes:
        match_len: tokens before the followed position that equal the last ones; 0: no position is followed.
    """

    def __init__(self, token_ids: IntArray, shared: HitRates) -> None:
        """Begin with [n] tokens.

        Args:
            shared: hit rates of all requests; learns from this one, too.
        """
        self._index = NgramIndex(token_ids)
        self._shared = shared
        self._rates = shared.copy(_OWN_WEIGHT)
        self._source = -1
        self.match_len = 0
        self._look()

    def __len__(self) -> int:
        """Number of tokens in the index."""
        return len(self._index)

    def observe(self, token_ids: Iterable[int]) -> None:
        """Add new tokens to the end of the text."""
        index = self._index
        for token_id in token_ids:
            hit = False
            if self.match_len:
                hit = index.tokens[self._source] == token_id
                self._rates.learn(self.match_len, hit=hit)
                self._shared.learn(self.match_len, hit=hit)
            index.append(token_id)
            if hit:
                self._source += 1
                self.match_len = min(self.match_len + 1, MAX_MATCH)
            else:
                self._look()

    def chances(self, count: int) -> list[float]:
        """For each of `count` drafts, the probability that it and all before it are correct; empty without a match."""
        if not self.match_len:
            return []
        chance, chances = 1.0, []
        for match_len in range(self.match_len, self.match_len + count):
            chance *= self._rates.of(match_len)
            chances.append(chance)
        return chances

    def drafts(self, count: int) -> list[int]:
        """The `count` tokens from the followed position on; there must be a match."""
        return self._index.following(self._source, count)

    def _look(self) -> None:
        match = self._index.find()
        self._source, self.match_len = (-1, 0) if match is None else match


def _class_of(match_len: int) -> int:
    return min(match_len.bit_length() - MIN_MATCH.bit_length(), len(_FIRST_RATES) - 1)
