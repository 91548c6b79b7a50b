"""`NgramProposer`: proposes the next tokens of a request from an earlier occurrence of its last tokens (prompt lookup).

It follows one earlier position of the text. While each new token equals the one that followed there, it advances; at
the first difference it looks for the longest match again (`NgramIndex`). Every new token, drafted or not, shows
whether the proposal was correct. So a request with bad proposals costs only this comparison, and a request that begins
to copy is detected without drafts.

    text   ... the scheduler decides what runs next ... so the scheduler decides
                                  ▲ source: "what", "runs", "next" are the drafts                match_len: 3

With `--speculative suffix` the position may also be in a finished answer of the same tenant (`SuffixIndex`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

import numpy as np

from ..arrays import IntArray
from ..records.stats import NGRAM, SUFFIX
from .suffix_index import MAX_MATCH, MAX_PLACES, Match, SuffixIndex

MIN_MATCH: Final = 2
"""Tokens that must be equal; a single equal token predicts the next one poorly."""
_SHIFT: Final = 32


class NgramIndex:
    """Earlier occurrences of the last tokens of a text, which is one request's prompt and output.

    Every pair of tokens maps to the positions after its occurrences, the newest first. A look-up compares backwards
    from a few positions of the last pair and chooses the one with the longest run of equal tokens before it. The cost
    does not depend on the length of the text: an append adds one entry to a dict, a look-up makes a few comparisons.
    The index needs about 130 bytes per token.

    Attributes:
        tokens: the text.
    """

    def __init__(self, token_ids: IntArray) -> None:
        """Index [n] tokens at once: 8,192 of them take some 2 ms."""
        self.tokens = array("i", token_ids.tobytes())
        ids = token_ids.astype(np.int64)
        keys = (ids[:-MIN_MATCH] << _SHIFT) | ids[1:-1]
        places = np.arange(MIN_MATCH, len(ids))
        order = np.argsort(keys, kind="stable")
        is_same = keys[order[1:]] == keys[order[:-1]]
        previous = np.full(len(token_ids), -1, dtype=np.int32)
        previous[places[order[1:][is_same]]] = places[order[:-1][is_same]]
        self._previous = array(
            "i", previous.tobytes()
        )  # of each position, the previous one after the same pair
        self._newest: dict[int, int] = dict(zip(keys.tolist(), places.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token_id: int) -> None:
        """Add a token to the end of the text."""
        tokens, place = self.tokens, len(self.tokens)
        if place >= MIN_MATCH:
            key = tokens[-2] << _SHIFT | tokens[-1]
            self._previous.append(self._newest.get(key, -1))
            self._newest[key] = place
        else:
            self._previous.append(-1)
        tokens.append(token_id)

    def find(self) -> Match | None:
        """The longest of the newest matches of the last tokens; among equals the newest. None if there is none."""
        tokens, end = self.tokens, len(self.tokens)
        if end <= MIN_MATCH:
            return None
        place = self._newest.get(tokens[-2] << _SHIFT | tokens[-1], -1)
        best, best_length = -1, 0
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length, most = MIN_MATCH, min(place, MAX_MATCH)
            while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
                if length == MAX_MATCH:
                    break
            place = self._previous[place]
        return Match(best, best_length) if best >= 0 else None

    def following(self, source: int, count: int) -> list[int]:
        """`count` tokens from `source` on; after the end of the text the tokens from `source` on are repeated."""
        found = self.tokens[source : source + count].tolist()
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return found


_FIRST_RATES: Final = (0.3, 0.55, 0.8, 0.9)
"""Initial hit rates of the token after a match of 2, 4, 8, 16 or more tokens."""
_OWN_WEIGHT: Final = 1 / 12
_SHARED_WEIGHT: Final = 1 / 256


class HitRates:
    """Share of correct tokens after a match, by the match's length in powers of two; moving averages.

    Matches in finished answers have rates of their own.
    """

    def __init__(self, rates: Iterable[float] = 2 * _FIRST_RATES, weight: float = _SHARED_WEIGHT) -> None:
        self._rates = list(rates)
        self._weight = weight

    def of(self, match_len: int, *, of_answers: bool = False) -> float:
        """The probability that the next token is correct."""
        return self._rates[_class_of(match_len, of_answers)]

    def learn(self, match_len: int, *, hit: bool, of_answers: bool = False) -> None:
        """Count one token after a match; `hit`: it was correct."""
        idx = _class_of(match_len, of_answers)
        self._rates[idx] += self._weight * (hit - self._rates[idx])

    def copy(self, weight: float) -> HitRates:
        """A copy with the same rates that learns with another weight."""
        return HitRates(self._rates, weight)


class NgramProposer:
    """See the module.

    Attributes:
        match_len: tokens before the followed position that equal the last ones; 0: no position is followed.
    """

    def __init__(
        self,
        token_ids: IntArray,
        shared: HitRates,
        answers: SuffixIndex | None = None,
        owner: int = 0,
    ) -> None:
        """Begin with [n] tokens.

        Args:
            shared: hit rates of all requests; learns from this one, too.
            answers: finished answers, of which those of `owner` are looked up as well; None: only the own text is.
        """
        self._index = NgramIndex(token_ids)
        self._shared = shared
        self._rates = shared.copy(_OWN_WEIGHT)
        self._answers, self._owner = answers, owner
        self._of_answers = False  # whether the followed position is in them
        self._source = -1
        self.match_len = 0
        self._search()

    def __len__(self) -> int:
        """Number of tokens in the index."""
        return len(self._index)

    def observe(self, token_ids: Iterable[int]) -> None:
        """Add new tokens to the end of the text."""
        for token_id in token_ids:
            proposed = self._following(1)
            hit = proposed == [token_id]
            if proposed:
                for rates in (self._rates, self._shared):
                    rates.learn(self.match_len, hit=hit, of_answers=self._of_answers)
            self._index.append(token_id)
            if hit:
                self._source += 1
                self.match_len = min(self.match_len + 1, MAX_MATCH)
            else:
                self._search()

    def chances(self, count: int) -> list[float]:
        """For each of `count` drafts, the probability that it and all before it are correct; empty without a match.

        There are fewer if an image follows, or if the answer that is followed ends.
        """
        count = len(self._following(count))
        if not count:
            return []
        chance, chances = 1.0, []
        for match_len in range(self.match_len, self.match_len + count):
            chance *= self._rates.of(match_len, of_answers=self._of_answers)
            chances.append(chance)
        return chances

    @property
    def method(self) -> int:
        """The source of the drafts: an index into `DRAFT_METHODS`."""
        return SUFFIX if self._of_answers else NGRAM

    def drafts(self, count: int) -> list[int]:
        """The `count` tokens from the followed position on; there must be as many `chances`."""
        return self._following(count)

    def _following(self, count: int) -> list[int]:
        if not self.match_len:
            return []
        if self._of_answers:
            assert self._answers is not None
            found = self._answers.following(self._source, count)
        else:
            found = self._index.following(self._source, count)
        if found and min(found) < 0:  # the ids of images, which no answer has
            found = found[: next(idx for idx, token_id in enumerate(found) if token_id < 0)]
        return found

    def _search(self) -> None:
        """Follow the longest match of the own text or that of the answers, whichever is right more often."""
        match = self._index.find()
        self._of_answers = False
        if self._answers is not None:
            found = self._answers.find(self._owner, self._index.tokens[-MAX_MATCH:])
            if found is not None and (
                match is None or self._rates.of(found.length, of_answers=True) > self._rates.of(match.length)
            ):
                match, self._of_answers = found, True
        self._source, self.match_len = (-1, 0) if match is None else match


def _class_of(match_len: int, of_answers: bool) -> int:
    longest = len(_FIRST_RATES) - 1
    return min(match_len.bit_length() - MIN_MATCH.bit_length(), longest) + of_answers * len(_FIRST_RATES)
