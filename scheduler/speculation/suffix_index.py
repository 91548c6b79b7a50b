"""`SuffixIndex`: earlier occurrences of a text's last tokens in finished answers (`--speculative suffix`).

A ring has the newest tokens of all answers, one answer after the other, and two hash chains lead through it as in
zlib's deflate: `heads` maps the hash of the last 2 or 6 tokens to the newest position after such tokens, `previous` a
position to the one before it with the same hash. A long context has a chain of its own because a frequent pair (": ",
'"') has more occurrences than a look-up compares.

    tokens      # prompt's end, answer 7 | # prompt's end, answer 8 | # prompt's end, answer 9    #: separator
    look-up     last tokens of a text -> position in answer 8; the tokens from there on are the drafts

The oldest answer is overwritten first. An answer that serves as a source is repeated by the answer that used it, so the
text in use is always among the newest.

A token takes about 50 bytes: 12 in the ring, 8 in each `previous`, 8 to 16 in each `heads`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

MAX_MATCH: Final = 32
"""Longer runs of equal tokens count as this long."""
MAX_PLACES: Final = 16
"""Positions that a look-up compares; it bounds the cost of a frequent pair (", and")."""
_DEPTHS: Final = (6, 2)
"""Tokens that a hash covers; a look-up tries the longer context first."""
_SEPARATOR: Final = -1


class Match(NamedTuple):
    """A position after tokens that equal the text's last ones.

    Attributes:
        source: position of the token that followed there; below the text's length.
        length: number of equal tokens, 2 to MAX_MATCH.
    """

    source: int
    length: int


class SuffixIndex:
    """See the module. Only answers of the same owner are compared: a tenant's text must not show in another's times."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: size of the ring."""
        self._size = max_tokens
        self._end = 1  # position of the next token; its place in the ring is the remainder; 0: no position
        self._tokens = np.zeros(max_tokens, dtype=np.int32).data  # memory is taken when it is written
        self._owners = np.zeros(max_tokens, dtype=np.int64).data
        num_heads = 1 << (max_tokens - 1).bit_length()
        self._mask = num_heads - 1
        self._heads = [np.zeros(num_heads, dtype=np.int64).data for _ in _DEPTHS]
        self._previous = [np.zeros(max_tokens, dtype=np.int64).data for _ in _DEPTHS]

    @staticmethod
    def owner_of(tenant: str, namespace: str) -> int:
        """The owner of the answers of a tenant in a namespace (adapter and cache salt)."""
        name = f"{len(tenant)}:{tenant}{namespace}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)

    def add(self, owner: int, token_ids: Sequence[int]) -> None:
        """Add an answer, its prompt's last tokens before it."""
        token_ids = token_ids[-(self._size - 1) :] if self._size > 1 else ()
        self._write(owner, _SEPARATOR)
        for idx, token_id in enumerate(token_ids):
            for depth, heads, previous in zip(_DEPTHS, self._heads, self._previous, strict=True):
                if idx >= depth:
                    key = hash((owner, *token_ids[idx - depth : idx])) & self._mask
                    previous[self._end % self._size] = heads[key]
                    heads[key] = self._end
            self._write(owner, token_id)

    def find(self, owner: int, last_ids: Sequence[int]) -> Match | None:
        """The longest of the newest matches of a text's last tokens; among equals the newest. None if there is none.

        Args:
            last_ids: up to MAX_MATCH tokens.
        """
        owners, size, oldest = self._owners, self._size, self._oldest
        for depth, heads, previous in zip(_DEPTHS, self._heads, self._previous, strict=True):
            if len(last_ids) < depth:
                continue
            position = heads[hash((owner, *last_ids[-depth:])) & self._mask]
            best, best_length = -1, depth - 1
            for _ in range(MAX_PLACES):
                if position < oldest:
                    break
                length = self._equal_before(position, last_ids)
                if length > best_length and owners[position % size] == owner:
                    best, best_length = position, length
                    if length == MAX_MATCH:
                        break
                position = previous[position % size]
            if best >= 0:
                return Match(best, best_length)
        return None

    def following(self, source: int, count: int) -> list[int]:
        """At most `count` tokens from `source` on: up to the end of the answer; none if it has been overwritten."""
        if source < self._oldest:
            return []
        first, most = source % self._size, min(count, self._end - source)
        found = self._tokens[first : first + most].tolist()
        if len(found) < most:
            found += self._tokens[: most - len(found)].tolist()
        return found[: found.index(_SEPARATOR)] if _SEPARATOR in found else found

    @property
    def _oldest(self) -> int:
        """The oldest position that is not overwritten."""
        return max(self._end - self._size, 1)

    def _write(self, owner: int, token_id: int) -> None:
        place = self._end % self._size
        self._tokens[place], self._owners[place] = token_id, owner
        self._end += 1

    def _equal_before(self, position: int, last_ids: Sequence[int]) -> int:
        """Number of tokens before a position that equal the last ones of a text; an answer's separator equals none."""
        tokens, size = self._tokens, self._size
        length, most = 0, min(len(last_ids), position - self._oldest)
        while length < most and tokens[(position - 1 - length) % size] == last_ids[-1 - length]:
            length += 1
        return length
