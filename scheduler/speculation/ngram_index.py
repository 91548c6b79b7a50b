"""`NgramIndex`: earlier occurrences of the last tokens of a text. The text is one request's prompt and output.

Every pair of tokens maps to the positions after its occurrences, the newest first. A look-up compares backwards from a
few positions of the last pair and chooses the one with the longest run of equal tokens before it. The cost does not
depend on the length of the text: an append adds one entry to a dict, a look-up makes a few comparisons. The index needs
about 130 bytes per token.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

import numpy as np

from ..arrays import IntArray

MIN_MATCH: Final = 2
"""Tokens that must be equal; a single equal token predicts the next one poorly."""
MAX_MATCH: Final = 32
"""Longer runs of equal tokens count as this long."""
_MAX_PLACES: Final = 16
"""Positions that a look-up compares; it bounds the cost of a frequent pair (", and")."""
_SHIFT: Final = 32


class Match(NamedTuple):
    """A position after tokens that equal the text's last ones.

    Attributes:
        source: position of the token that followed there; below the text's length.
        length: number of equal tokens, MIN_MATCH to MAX_MATCH.
    """

    source: int
    length: int


class NgramIndex:
    """See the module.

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
        """`count` tokens from `source` on; after the end of the text the tokens from `source` on are repeated."""
        found = self.tokens[source : source + count].tolist()
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return found
