"""Markers in the bytes of tokens: searches for markers and triggers, the tokens that spell a marker, reasoning blocks.

A marker may be one special token, several tokens of text, or a part of a token that has other text before or after it.
Text after the end marker of a reasoning block in the same token belongs to the answer. A mask cannot express a part of
a token, so masks of a block that a grammar follows exclude the tokens that have such text.
"""

# Shapes: V tokens of the model's vocabulary, W = ceil(V / 32) words of a mask.

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ..runtime.grammar_use import ReasoningBlock
from .backend import MaskRow, Matcher, Vocabulary

_WHITESPACE: Final = b" \t\r\n"


class MarkerSearch:
    """Finds the first occurrence of a marker in a stream of bytes (Knuth, Morris and Pratt).

    The state of a stream is the number of bytes of the marker that its end matches; 0 at the start.
    """

    def __init__(self, marker: bytes) -> None:
        """Build the table of borders.

        Args:
            marker: at least one byte.
        """
        self.marker = marker
        borders = [0] * (
            len(marker) + 1
        )  # borders[n]: the longest proper prefix of marker[:n] that is its suffix
        k = 0
        for n in range(1, len(marker)):
            while k and marker[n] != marker[k]:
                k = borders[k]
            k += marker[n] == marker[k]
            borders[n + 1] = k
        self._borders = borders

    def advance(self, state: int, data: bytes) -> tuple[int, int]:
        """Read bytes.

        Returns:
            The new state, and the number of bytes up to the end of the marker, or -1 if it has not ended.
        """
        marker, borders = self.marker, self._borders
        for index, byte in enumerate(data):
            while state and byte != marker[state]:
                state = borders[state]
            state += byte == marker[state]
            if state == len(marker):
                return state, index + 1
        return state, -1


class MarkerTable:
    """A marker in one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, marker: bytes) -> None:
        """Look for the tokens that may complete the marker; takes 20 ms for 150,000 tokens."""
        self.search = MarkerSearch(marker)
        self._vocabulary = vocabulary
        self._rows: dict[int, MaskRow] = {}
        suffixes = tuple(marker[start:] for start in range(len(marker)))
        first_bytes = frozenset(marker)
        self._completing = [
            token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if token and ((token[0] in first_bytes and token.startswith(suffixes)) or marker in token)
        ]
        self._eos_token_ids = frozenset(vocabulary.eos_token_ids)
        text_ids = (i for i, token in enumerate(vocabulary.tokens) if token and i not in self._eos_token_ids)
        self._all_but_eos = mask_of(text_ids, vocabulary.size)

    def open_row(self, state: int) -> MaskRow:
        """[W]: all tokens, except EOS and those that have text after the marker.

        Text after the marker in the same token is constrained by a grammar that cannot be consulted for a part of a
        token when the mask is made; without such tokens the answer begins at the border of a token.
        """
        row = self._rows.get(state)
        if row is None:
            tokens = self._vocabulary.tokens
            crossing = [
                i for i in self._completing if -1 < self.search.advance(state, tokens[i])[1] < len(tokens[i])
            ]
            row = self._all_but_eos.copy()
            for token_id in crossing:
                clear(row, token_id)
            row.setflags(write=False)
            self._rows[state] = row
        return row

    @functools.cached_property
    def most_tokens(self) -> int:
        """The most tokens of the rest of the marker, whatever bytes of it are there."""
        return max(len(self.next_tokens(state)) for state in range(len(self.search.marker)))

    def next_tokens(self, state: int) -> tuple[int, ...]:
        """The tokens that spell the marker from its byte `state` on, special tokens included; () if none do."""
        rest = self.search.marker[state:]
        token_ids = marker_tokens(self._vocabulary, rest)
        return token_ids if b"".join(self._vocabulary.tokens[i] for i in token_ids) == rest else ()

    @functools.cached_property
    def continuations(self) -> tuple[tuple[int, ...], ...]:
        """For each number of bytes of the marker that are there, the tokens that continue it.

        These are tokens that are a part of its rest, and those that begin with the whole rest.
        """
        marker, tokens = self.search.marker, self._vocabulary.tokens
        ids_of: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(tokens):
            if token and token in marker and token_id not in self._eos_token_ids:
                ids_of.setdefault(token, []).append(token_id)
        return tuple(
            tuple(
                [i for end in range(start + 1, len(marker)) for i in ids_of.get(marker[start:end], ())]
                + [
                    i
                    for i in self._completing
                    if tokens[i].startswith(marker[start:]) and i not in self._eos_token_ids
                ]
            )
            for start in range(len(marker))
        )


@functools.lru_cache(maxsize=32)
def marker_table(vocabulary: Vocabulary, marker: bytes) -> MarkerTable:
    """The table of a marker; models have few markers, so it is built once per process."""
    return MarkerTable(vocabulary, marker)


def marker_tokens(vocabulary: Vocabulary, data: bytes) -> tuple[int, ...]:
    """The tokens that spell a marker; special tokens where their text is written in it."""
    special = {vocabulary.tokens[i]: i for i in sorted(vocabulary.special_token_ids, reverse=True)}
    special.pop(b"", None)
    found: list[int] = []
    text_start = position = 0
    while position < len(data):
        token = max((text for text in special if data.startswith(text, position)), key=len, default=b"")
        if token:
            found += vocabulary.encode(data[text_start:position]) if position > text_start else []
            found.append(special[token])
            position += len(token)
            text_start = position
        else:
            position += 1
    if text_start < len(data):
        found += vocabulary.encode(data[text_start:])
    return tuple(found)


def mask_of(token_ids: Iterable[int], size: int) -> MaskRow:
    """[W]: a mask of V = `size` tokens that allows these."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allow(mask: MaskRow, token_id: int) -> None:
    """Set the bit of a token."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def clear(mask: MaskRow, token_id: int) -> None:
    """Clear the bit of a token."""
    mask.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


def allows(mask: MaskRow, token_id: int) -> bool:
    """Whether a mask allows a token."""
    return bool(int(mask[token_id // 32]) >> token_id % 32 & 1)


class TriggerSearch:
    """Finds the trigger that ends first in a stream of bytes; of several that end there, the longest."""

    def __init__(self, triggers: Sequence[bytes]) -> None:
        self._triggers = triggers
        self._tail_len = max(map(len, triggers), default=1) - 1

    def find(self, text: bytes) -> tuple[int, int] | None:
        """The index of a trigger, and where the text after it begins; None if there is none."""
        found = [
            (start + len(trigger), -len(trigger), index)
            for index, trigger in enumerate(self._triggers)
            if (start := text.find(trigger)) >= 0
        ]
        if not found:
            return None
        end, _, index = min(found)
        return index, end

    def tail(self, text: bytes) -> bytes:
        """The end of a text without a trigger that may be the beginning of one."""
        return text[max(0, len(text) - self._tail_len) :]


def feed_bytes(matcher: Matcher, data: bytes, vocabulary: Vocabulary) -> int:
    """Feed text that is a part of a token; returns the number of bytes that were accepted.

    It stops at the end of the grammar's text. A matcher that has refused a byte has an error.
    """
    singles = single_bytes(vocabulary)
    known = all(byte in singles for byte in data)
    count = 0
    for token_id in [singles[byte] for byte in data] if known else vocabulary.encode(data):
        if matcher.ended:
            break
        token = vocabulary.tokens[token_id]
        if not data.startswith(token, count) or not matcher.accept((token_id,)):
            break
        count += len(token)
    return count


@functools.lru_cache(maxsize=4)
def single_bytes(vocabulary: Vocabulary) -> dict[int, int]:
    """The text token of each byte that is one."""
    special = vocabulary.special_token_ids
    return {
        token[0]: token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if len(token) == 1 and token_id not in special
    }


class BlockOpening:
    """The beginning of an answer that may open a block: whitespace, then the marker.

    Attributes:
        text: what was read so far.
    """

    def __init__(self, block: ReasoningBlock, vocabulary: Vocabulary) -> None:
        self._block = block
        self._vocabulary = vocabulary
        self.text = b""

    @property
    def may_open(self) -> bool:
        """Whether the text can still become the marker."""
        return self._block.begin.startswith(self._marker_text)

    @property
    def rest(self) -> bytes | None:
        """The text after the marker, once it is complete; None before."""
        text, begin = self._marker_text, self._block.begin
        return text[len(begin) :] if text.startswith(begin) else None

    def read(self, data: bytes) -> None:
        """Read the bytes of a token."""
        self.text += data

    def allow_marker(self, mask: MaskRow) -> None:
        """Add the tokens that continue the marker to a mask. Whitespace before it is not offered."""
        tokens = self._vocabulary.tokens
        there = len(self._marker_text)
        missing = len(self._block.begin) - there
        end_search = marker_table(self._vocabulary, self._block.end).search
        for token_id in marker_table(self._vocabulary, self._block.begin).continuations[there]:
            inside = tokens[token_id][missing:]
            if end_search.advance(0, inside)[1] in (-1, len(inside)):
                allow(mask, token_id)

    def copy(self) -> BlockOpening:
        """An independent object in the same state."""
        return copy.copy(self)

    @property
    def _marker_text(self) -> bytes:
        return self.text.lstrip(_WHITESPACE)


class OpenBlock:
    """A block that is open, from its first byte to the end marker.

    Attributes:
        end_tokens: the tokens that must come next, once the budget is used up; () before.
    """

    def __init__(self, block: ReasoningBlock, vocabulary: Vocabulary) -> None:
        self._budget = block.budget
        self._table = marker_table(vocabulary, block.end)
        self._marker_state = 0  # bytes of the end marker that the text ends with
        self._num_tokens = 0
        self.end_tokens: tuple[int, ...] = ()

    def fill(self, mask: MaskRow) -> None:
        """Write the tokens of the end marker once they must follow; before, all that stay in the block or end it.

        EOS is not among them.
        """
        mask.fill(0)
        if self.end_tokens:
            allow(mask, self.end_tokens[0])
        else:
            row = self._table.open_row(self._marker_state)
            mask[: row.size] = row

    @property
    def num_end_tokens(self) -> int:
        """Tokens of the end marker, if it begins now."""
        return len(self._table.next_tokens(self._marker_state))

    def bound(self, num_tokens: int) -> None:
        """Lower the budget so that the block ends within this many further tokens, those of the end marker included."""
        most = self._num_tokens + max(0, num_tokens - self._table.most_tokens)
        self._budget = most if self._budget is None else min(self._budget, most)
        if self._num_tokens >= self._budget and not self.end_tokens:
            self.end_tokens = self._table.next_tokens(self._marker_state)

    def takes(self, token_id: int) -> bool:
        """Whether a token other than EOS may come next."""
        return not self.end_tokens or token_id == self.end_tokens[0]

    def read(self, data: bytes, num_tokens: int = 1) -> bytes | None:
        """Read the bytes of a token that `takes` has allowed.

        Args:
            data: of the token.
            num_tokens: 0 for the rest of the token that opened the block.

        Returns:
            The bytes after the end marker, once it is complete; None before.
        """
        self._num_tokens += num_tokens
        self._marker_state, end = self._table.search.advance(self._marker_state, data)
        if end >= 0:
            return data[end:]
        self.end_tokens = self.end_tokens[num_tokens:]
        if self._budget is not None and self._num_tokens >= self._budget and not self.end_tokens:
            self.end_tokens = self._table.next_tokens(self._marker_state)
        return None

    def copy(self) -> OpenBlock:
        """An independent object in the same state."""
        return copy.copy(self)
