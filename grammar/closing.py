"""`shortest_end`: a short way from a position in a JSON answer to its end.

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
from .json_state import JsonState

_MAX_RANK: Final = 16
"""Longer tokens are not preferred: they are runs of blanks and the like."""
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
