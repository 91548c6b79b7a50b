"""`shortest_end`, `JsonState`: a short way from a position in a JSON answer to its end.

The search is greedy: forced text, else the first token of a list that the grammar allows at this kind of position, else
the longest token that it allows. All tokens are checked by the matcher, so a way that is found is valid; it need not be
the shortest one. The greedy search finds no end where a string has a pattern that a long token leads away from its end.
"""

# Shapes: V tokens of the model's vocabulary, W = ceil(V / 32) words of a mask.

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from .backend import MaskRow, Matcher, Vocabulary

_MAX_RANK: Final = 16
"""Longer tokens are not preferred: they are runs of blanks and the like."""
_MAX_SHORT_TOKENS: Final = 2048
"""Tokens of the document whose forced tokens are counted."""
_STRING: Final = (b'"',)
_CHARACTER: Final = (b"\x80", b"\xa0", b"\x90")
_ESCAPE: Final = (b"n", b"0")
_DIGIT: Final = (b"4", b"0")
"""The third digit of an escape, so that it is not the NUL character."""
_VALUES: Final = (b"null", b'""', b"0", b"[]", b"{}", b'"', b"[", b"{", b"true", b"false", b"1", b"-")
_IN_ARRAY: Final = (b"]", *_VALUES)
_IN_OBJECT: Final = (b"}", b'"')
_AFTER: Final = (b":", b"}", b"]", b",")
_LISTS: Final = (_STRING, _CHARACTER, _ESCAPE, _DIGIT, _VALUES, _IN_ARRAY, _IN_OBJECT, _AFTER)
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_UNICODE: Final = 0x75
_BLANKS: Final = b" \t\r\n"


class JsonState:
    """The position at the end of a JSON text. It checks nothing: the grammar does.

    Attributes:
        in_string: the end is inside a string or the name of a field.
        escape_len: bytes of an escape that are missing: 0 outside of one, 1 after a backslash, 4 to 1 after `u`.
        utf8_len: continuation bytes that the last character of a string lacks.
        is_name: the string is the name of a field.
        last: the last byte that is no whitespace, outside of strings; 0 at the beginning.
    """

    __slots__ = ("_is_unicode", "_open", "escape_len", "in_string", "is_name", "last", "utf8_len")

    def __init__(self) -> None:
        self.in_string = False
        self.is_name = False
        self.escape_len = 0
        self.utf8_len = 0
        self.last = 0
        self._is_unicode = False
        self._open = b""  # the brackets that are not closed

    def read(self, data: bytes) -> None:
        """Append bytes."""
        for byte in data:
            if self.in_string:
                self._read_string_byte(byte)
            elif byte not in _BLANKS:
                self._read_sign(byte)

    def copy(self) -> JsonState:
        """An independent state at the same position."""
        twin = JsonState.__new__(JsonState)
        twin.in_string, twin.escape_len, twin.utf8_len = self.in_string, self.escape_len, self.utf8_len
        twin.last, twin._is_unicode = self.last, self._is_unicode
        twin.is_name, twin._open = self.is_name, self._open
        return twin

    def _read_sign(self, byte: int) -> None:
        if byte == _QUOTE:
            self.in_string = True
            self.is_name = self._open.endswith(b"{") and self.last in b"{,"
        elif byte in b"{[":
            self._open += bytes((byte,))
        elif byte in b"}]":
            self._open = self._open[:-1]
        self.last = byte

    def _read_string_byte(self, byte: int) -> None:
        if self.escape_len:
            if byte == _UNICODE and not self._is_unicode:
                self.escape_len, self._is_unicode = 4, True
            else:
                self.escape_len -= 1
            self._is_unicode = self._is_unicode and self.escape_len > 0
        elif byte == _BACKSLASH:
            self.escape_len = 1
        elif byte == _QUOTE:
            self.in_string, self.last = False, byte
        elif byte >= 0xC0:
            self.utf8_len = 1 + (byte >= 0xE0) + (byte >= 0xF0)
        elif self.utf8_len:
            self.utf8_len -= 1


class ClosingTokens:
    """The tokens of one vocabulary that the search prefers.

    Attributes:
        plain: [W] mask of the tokens that are whole printable characters of a string, without quotes and escapes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Look at all tokens; takes 0.1 s for 150,000 tokens."""
        wanted = {text for texts in _LISTS for text in texts}
        special = vocabulary.special_token_ids
        id_of: dict[bytes, int] = {}
        num_tokens = min(len(vocabulary.tokens), vocabulary.size)
        self._ranks: npt.NDArray[np.uint8] = np.zeros(-(-vocabulary.size // 32) * 32, np.uint8)
        plain = np.zeros_like(self._ranks)
        for token_id, token in enumerate(vocabulary.tokens[:num_tokens]):
            if not token or token_id in special:
                continue
            if token in wanted:
                id_of.setdefault(token, token_id)
            self._ranks[token_id] = 1 if token.isspace() else 1 + min(len(token), _MAX_RANK)
            plain[token_id] = _is_plain(token)
        self.plain: MaskRow = np.packbits(plain, bitorder="little").view(np.int32)
        self.plain.setflags(write=False)
        self._ids: dict[tuple[bytes, ...], tuple[int, ...]] = {
            texts: tuple(id_of[t] for t in texts if t in id_of) for texts in _LISTS
        }

    def candidates(self, state: JsonState) -> Sequence[int]:
        """The tokens to try at a position, the best first."""
        texts: tuple[bytes, ...]
        if state.in_string:
            if state.escape_len:
                texts = _DIGIT if state.escape_len == 2 else _ESCAPE
            else:
                texts = _CHARACTER if state.utf8_len else _STRING
        elif state.last in b"\x00,:":
            texts = _VALUES
        else:
            texts = {0x5B: _IN_ARRAY, 0x7B: _IN_OBJECT}.get(state.last, _AFTER)
        return self._ids[texts]

    def longest(self, mask: MaskRow) -> int:
        """The longest token that a mask allows; -1 if there is none but special ones."""
        ranks = self._ranks * np.unpackbits(mask.view(np.uint8), bitorder="little")
        best = int(ranks.argmax())
        return best if ranks[best] else -1


@functools.lru_cache(maxsize=4)
def closing_tokens(vocabulary: Vocabulary) -> ClosingTokens:
    """The tables of a vocabulary, built once per process."""
    return ClosingTokens(vocabulary)


def shortest_end(
    matcher: Matcher, vocabulary: Vocabulary, state: JsonState, max_tokens: int
) -> list[int] | None:
    """A short way to the end of a JSON answer.

    Args:
        matcher: stays as it is.
        vocabulary: of the matcher.
        state: of the text that the matcher has accepted; stays as it is.
        max_tokens: of the way.

    Returns:
        The tokens, after which the answer is complete: it has ended, or an EOS token is allowed. None if the search
        does not find such a way.
    """
    tokens, texts = closing_tokens(vocabulary), vocabulary.tokens
    ahead, position = matcher.copy(), state.copy()
    way: list[int] = []
    while not is_complete(ahead, vocabulary):
        left = max_tokens - len(way)
        step = _next_tokens(ahead, vocabulary, tokens, position) if left > 0 else []
        if not step or len(step) > left or ahead.accept(step) != len(step) or ahead.error:
            return None
        for token_id in step:
            position.read(texts[token_id])
        way += step
    return way


def forced_share(matcher: Matcher, vocabulary: Vocabulary) -> float | None:
    """The share of forced tokens in a short document of a schema, as `shortest_end` makes it.

    Args:
        matcher: of the schema, at the beginning; it is advanced.
        vocabulary: of the matcher.

    Returns:
        In [0, 1]; None where the search finds no document.
    """
    way = shortest_end(matcher, vocabulary, JsonState(), _MAX_SHORT_TOKENS)
    if not way:
        return None
    for token_id in way:
        matcher.forced()  # it counts them
        matcher.accept((token_id,))
    return round(matcher.num_forced / len(way), 3)


def is_complete(matcher: Matcher, vocabulary: Vocabulary) -> bool:
    """Whether an answer may end here."""
    if matcher.error:
        return False
    return matcher.ended or any(matcher.validate((eos,)) for eos in vocabulary.eos_token_ids[:1])


def _next_tokens(
    matcher: Matcher, vocabulary: Vocabulary, tokens: ClosingTokens, state: JsonState
) -> list[int]:
    """The next tokens of the way; [] if there are none."""
    forced = matcher.forced()
    if forced:
        return forced
    for token_id in tokens.candidates(state):
        if matcher.validate((token_id,)):
            return [token_id]
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    matcher.fill(mask)
    best = -1 if matcher.error else tokens.longest(mask)
    return [] if best < 0 else [best]


def _is_plain(token: bytes) -> bool:
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() and '"' not in text and "\\" not in text
