"""`NgramIndex`: where the last tokens of a text have stood in it before. One request's prompt and output.

Every pair of tokens leads to the places behind which it stood, the newest first. The last pair's places are compared
backwards, a few of them, and the one with the longest run of equal tokens before it wins. An append costs one entry of
a dict, a look-up a few comparisons, whatever the length of the text; about 130 bytes are kept of each token.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

import numpy as np

from ..arrays import IntArray

MIN_MATCH: Final = 2
"""Tokens that must be equal; one alone says little about the next."""
MAX_MATCH: Final = 32
"""Longer runs of equal tokens are not told apart."""
_MAX_PLACES: Final = 16
"""Places that a look-up compares: more would make a frequent pair (", and") dear."""
_SHIFT: Final = 32


class Match(NamedTuple):
    """A place whose tokens before it are the text's last ones.

    Attributes:
        source: position of the token that followed there; below the text's length.
        length: how many tokens are equal, MIN_MATCH to MAX_MATCH.
    """

    source: int
    length: int


class NgramIndex:
    """See the module.

    Attributes:
        tokens: the text.
    """

    __slots__ = ("_newest", "_previous", "tokens")

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
        )  # of each place, the one before it behind the same pair
        self._newest: dict[int, int] = dict(zip(keys.tolist(), places.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token_id: int) -> None:
        """The text goes on."""
        tokens, place = self.tokens, len(self.tokens)
        if place >= MIN_MATCH:
            key = tokens[-2] << _SHIFT | tokens[-1]
            self._previous.append(self._newest.get(key, -1))
            self._newest[key] = place
        else:
            self._previous.append(-1)
        tokens.append(token_id)

    def find(self) -> Match | None:
        """The longest of the newest matches of the last tokens; among equals the newest. None without any."""
        tokens, end = self.tokens, len(self.tokens)
        if end <= MIN_MATCH:
            return None
        place = self._newest.get(tokens[-2] << _SHIFT | tokens[-1], -1)
        best, best_length = -1, 0
        for _ in range(_MAX_PLACES):
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
        """`count` tokens from `source` on; where the text ends it is thought to repeat what follows `source`."""
        found = self.tokens[source : source + count].tolist()
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return found
