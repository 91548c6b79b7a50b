"""`shortest_end`: a short way from a position in a JSON answer to its end.

The search is greedy: forced text, else the first token of a list that the grammar allows at this kind of position, else
the longest token that it allows. The text that it finds is then split by the tokenizer, which takes fewer tokens. All
tokens are checked by the matcher, so a way that is found is valid; it need not be the shortest one. Where a string has
a pattern (an e-mail address) and a long token leads away from its end, the end is searched by characters.
"""

# Shapes: V tokens of the model's vocabulary, W = ceil(V / 32) words of a mask.

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .backend import CompiledGrammar, MaskRow, Matcher, Vocabulary
from .json_state import BLANKS, JsonState
from .markers import allows

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
_FILLERS: Final = (b"x", b"0", b"a", b"X", b"-")
"""Characters that make a name another one."""
_LISTS: Final = (_STRING, _CHARACTER, _ESCAPE, _DIGIT, _VALUES, _IN_ARRAY, _IN_OBJECT, _AFTER, _FILLERS)
_GREEDY_FACTOR: Final = 2
_GREEDY_MORE: Final = 8
"""The tokens of a greedy way may be so many, per token of a way and beside them: the tokenizer's split has fewer."""
_FIRST_TOKENS: Final = 128
"""Tokens of the first greedy way: most are shorter, and one in a string with a pattern may have no end."""
_MAX_STATES: Final = 256
"""States of a string with a pattern that are looked at: 10 to 30 ms."""

_IN_TEXT: Final = JsonState()
_IN_TEXT.read(b'"')
_AFTER_NUMBER: Final = JsonState()
_AFTER_NUMBER.read(b"0")


class Skeleton(NamedTuple):
    """The effect of a token on a document: equal for tokens after which the same ways lead to the end.

    Attributes:
        kept: its bytes, without blanks around signs and without a part of a character at its end.
        escape_len, utf8_len: what it leaves open, as in `JsonState`.
        num_begun: values and members that it begins.
    """

    kept: bytes
    escape_len: int
    utf8_len: int
    num_begun: int


class ClosingTokens:
    """The tokens of one vocabulary, as the search and `CompletingMatcher` need them.

    Attributes:
        num_chars: [V] uint8, characters of a token that is whole printable characters of a string, without quotes and
            escapes; 0 of any other token, and of one with more than 255.
        num_up_to: [256] number of tokens with 1 to n characters by `num_chars`.
        of_num_chars: [256] the tokens with each number of characters, ascending.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Look at all tokens; takes 0.1 s for 150,000 tokens."""
        wanted = {text for texts in _LISTS for text in texts}
        special = vocabulary.special_token_ids
        id_of: dict[bytes, int] = {}
        num_tokens = min(len(vocabulary.tokens), vocabulary.size)
        self._ranks: npt.NDArray[np.uint8] = np.zeros(-(-vocabulary.size // 32) * 32, np.uint8)
        self.num_chars: npt.NDArray[np.uint8] = np.zeros_like(self._ranks)
        for token_id, token in enumerate(vocabulary.tokens[:num_tokens]):
            if not token or token_id in special:
                continue
            if token in wanted:
                id_of.setdefault(token, token_id)
            self._ranks[token_id] = 1 if token.isspace() else 1 + min(len(token), _MAX_RANK)
            self.num_chars[token_id] = _num_plain_chars(token)
        counts = np.bincount(self.num_chars, minlength=256)
        order = np.argsort(self.num_chars, kind="stable")
        self.of_num_chars = np.split(order, counts.cumsum()[:-1])
        counts[0] = 0
        self.num_up_to = counts.cumsum()
        self._tokens = vocabulary.tokens
        self._skeletons: dict[tuple[int, bool, tuple[object, ...]], Skeleton] = {}
        self._numbers: dict[
            tuple[object, ...], npt.NDArray[np.int32]
        ] = {}  # [V] of groups, at a kind of position
        self._group_ids: dict[tuple[object, ...], dict[object, int]] = {}
        self._ids: dict[tuple[bytes, ...], tuple[int, ...]] = {
            texts: tuple(id_of[t] for t in texts if t in id_of) for texts in _LISTS
        }
        self.fillers = self._ids[_FILLERS]
        characters = {token: i for i, token in reversed(list(enumerate(vocabulary.tokens[:num_tokens])))}
        self.characters = [
            (characters[char], _kind(char.decode()))
            for char in (bytes((byte,)) for byte in range(0x20, 0x7F))
            if char in characters and self.num_chars[characters[char]]
        ]

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

    def skeleton(self, token_id: int, state: JsonState, *, is_free: bool) -> Skeleton:
        """The effect of a token on a document.

        Args:
            token_id: of the token.
            state: before it.
            is_free: characters of the string that `state` is in count, and do not differ.
        """
        key = token_id, is_free, state.kind
        found = self._skeletons.get(key)
        if found is None:
            end, kept, char_start = state.copy(), bytearray(), 0
            for byte in self._tokens[token_id]:
                is_plain = is_free and end.in_string and not end.escape_len and byte not in b'"\\'
                is_free = is_free and end.in_string
                if byte >= 0xC0:
                    char_start = len(kept)
                if is_plain:
                    kept += b"" if 0x80 <= byte < 0xC0 else b"x"
                elif end.in_string or byte not in BLANKS:
                    kept.append(byte)
                end.read(bytes((byte,)))
            if end.utf8_len:
                del kept[char_start:]
            num_begun = end.num_begun - state.num_begun
            found = self._skeletons[key] = Skeleton(bytes(kept), end.escape_len, end.utf8_len, num_begun)
        return found

    def grouped(
        self, token_ids: npt.NDArray[np.intp], key_of: Callable[[int], object], position: tuple[object, ...]
    ) -> dict[object, npt.NDArray[np.intp]]:
        """Tokens by their keys, each of which is computed once per kind of position.

        Args:
            token_ids: ascending.
            key_of: the key of a token; the same at all positions of this kind.
            position: the kind.
        """
        if position not in self._numbers:
            self._numbers[position] = np.full(self._ranks.size, -1, np.int32)
            self._group_ids[position] = {}
        numbers, ids = self._numbers[position], self._group_ids[position]
        for token_id in token_ids[numbers[token_ids] < 0].tolist():
            numbers[token_id] = ids.setdefault(key_of(token_id), len(ids))
        found = numbers[token_ids]
        order = np.argsort(found, kind="stable")
        parts = np.split(token_ids[order], np.flatnonzero(np.diff(found[order])) + 1)
        return {key_of(int(part[0])): part for part in parts if len(part)}

    @functools.lru_cache(maxsize=1 << 18)  # noqa: B019  (as many tables as vocabularies, which a process keeps)
    def kinds(self, token_id: int) -> str:
        """The kinds of the characters of a token, repeated ones once: letters, digits, each other sign."""
        kinds = [_kind(char) for char in self._tokens[token_id].decode(errors="replace")]
        return "".join(kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before)

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
    matcher: Matcher,
    vocabulary: Vocabulary,
    state: JsonState,
    max_tokens: int,
    path: Sequence[int] = (),
) -> list[int] | None:
    """A short way to the end of a JSON answer.

    Args:
        matcher: stays as it is.
        vocabulary: of the matcher.
        state: of the text that the matcher has accepted; stays as it is.
        max_tokens: of the way.
        path: a way from a position that was shortly before this one: its part from the end of a string on is taken
            where it fits, so that only the rest of the string is searched.

    Returns:
        The tokens, after which the answer is complete: it has ended, or an EOS token is allowed. None if the search
        does not find such a way.
    """
    most = _GREEDY_FACTOR * max_tokens + _GREEDY_MORE
    way = _greedy_end(matcher, vocabulary, state, _FIRST_TOKENS, tail=_tail_of(path, vocabulary, state))
    if way is not None and len(way) > most:
        return None
    if way is None:
        way = _greedy_end(matcher, vocabulary, state, most, by_characters=True)
    if way is None and most > _FIRST_TOKENS:
        way = _greedy_end(matcher, vocabulary, state, most)
    if way is None and state.in_string and state.is_name and not (state.escape_len or state.utf8_len):
        way = _end_of_other_name(matcher, vocabulary, state, max_tokens)
    if way is None:
        return None
    split = vocabulary.encode(b"".join(vocabulary.tokens[i] for i in way))
    if len(split) < len(way) and leads_to_end(matcher, vocabulary, split):
        way = split
    return way if len(way) <= max_tokens else None


def leads_to_end(matcher: Matcher, vocabulary: Vocabulary, way: Sequence[int]) -> bool:
    """Whether an answer is complete after these tokens."""
    eos = vocabulary.eos_token_ids[:1]
    if eos:
        return matcher.validate([*way, *eos]) > len(way)
    ahead = matcher.copy()
    return ahead.accept(way) == len(way) and is_complete(ahead, vocabulary)


def _greedy_end(
    matcher: Matcher,
    vocabulary: Vocabulary,
    state: JsonState,
    max_tokens: int,
    *,
    by_characters: bool = False,
    tail: Sequence[int] = (),
) -> list[int] | None:
    tokens, texts = closing_tokens(vocabulary), vocabulary.tokens
    ahead, position = matcher.copy(), state.copy()
    way: list[int] = []
    while not is_complete(ahead, vocabulary):
        if tail and position.in_string and leads_to_end(ahead, vocabulary, tail):
            return [*way, *tail]
        left = max_tokens - len(way)
        step = _next_tokens(ahead, vocabulary, tokens, position, left, by_characters) if left > 0 else []
        if not step or len(step) > left or ahead.accept(step) != len(step) or ahead.error:
            return None
        for token_id in step:
            position.read(texts[token_id])
        way += step
    return way


def _tail_of(path: Sequence[int], vocabulary: Vocabulary, state: JsonState) -> Sequence[int]:
    """The part of a path from the end of the string on; () if the position is in none, or in a name."""
    if not state.in_string or state.is_name:
        return ()
    return next((path[k:] for k, token_id in enumerate(path) if b'"' in vocabulary.tokens[token_id]), ())


def _end_of_other_name(
    matcher: Matcher, vocabulary: Vocabulary, state: JsonState, max_tokens: int
) -> list[int] | None:
    """The way through a name with one more character: the name as it is may require a long value."""
    for token_id in closing_tokens(vocabulary).fillers:
        ahead, position = matcher.copy(), state.copy()
        if ahead.accept((token_id,)) and not ahead.error:
            position.read(vocabulary.tokens[token_id])
            if (rest := _greedy_end(ahead, vocabulary, position, max_tokens)) is not None:
                return [token_id, *rest]
    return None


def forced_share(compiled: CompiledGrammar) -> float | None:
    """The share of forced tokens in the short answer of a grammar, in [0, 1]; None if it has none."""
    if not compiled.short_answer:
        return None
    matcher = compiled.matcher()
    for token_id in compiled.short_answer:
        matcher.forced()  # it counts them
        matcher.accept((token_id,))
    return round(matcher.num_forced / len(compiled.short_answer), 3)


def is_complete(matcher: Matcher, vocabulary: Vocabulary) -> bool:
    """Whether an answer may end here."""
    if matcher.error:
        return False
    return matcher.ended or any(matcher.validate((eos,)) for eos in vocabulary.eos_token_ids[:1])


def _next_tokens(
    matcher: Matcher,
    vocabulary: Vocabulary,
    tokens: ClosingTokens,
    state: JsonState,
    max_tokens: int,
    by_characters: bool,
) -> list[int]:
    """The next tokens of the way; [] if there are none."""
    forced = matcher.forced()
    if forced:
        return forced
    for token_id in tokens.candidates(state):
        if matcher.validate((token_id,)):
            return [token_id]
    if by_characters and (
        state.in_number or (state.in_string and not state.escape_len and not state.utf8_len)
    ):
        return _end_by_characters(matcher, vocabulary, tokens, state, max_tokens)
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    matcher.fill(mask)
    best = -1 if matcher.error else tokens.longest(mask)
    return [] if best < 0 else [best]


def _end_by_characters(
    matcher: Matcher, vocabulary: Vocabulary, tokens: ClosingTokens, state: JsonState, max_tokens: int
) -> list[int]:
    """At most `max_tokens` tokens of characters after which a string or a number may end; [] if they are not found.

    Breadth first, with the first allowed character of each kind before the others. Positions of one length with equal
    masks count as one state.
    """
    ends = tokens.candidates(_IN_TEXT if state.in_string else _AFTER_NUMBER)
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    seen: set[tuple[int, bytes]] = set()
    pending: list[tuple[int, int, Matcher, tuple[int, ...]]] = [(0, 0, matcher, ())]
    for count in range(_MAX_STATES):
        if not pending:
            break
        _, _, here, way = heapq.heappop(pending)
        if way and (any(here.validate((end,)) for end in ends) or is_complete(here, vocabulary)):
            return list(way)
        if forced := here.forced():
            return [*way, *forced]
        if len(way) >= max_tokens:
            continue
        here.fill(mask)
        key = len(way), mask.tobytes()
        if here.error or key in seen:
            continue
        seen.add(key)
        kinds: set[str] = set()
        for number, (token_id, kind) in enumerate(tokens.characters):
            if allows(mask, token_id):
                ahead = here.copy()
                if ahead.accept((token_id,)) and not ahead.error and not ahead.ended:
                    cost = len(way) + 1 + (2 if kind in kinds else 0)
                    heapq.heappush(pending, (cost, 1000 * count + number, ahead, (*way, token_id)))
                kinds.add(kind)
    return []


def _num_plain_chars(token: bytes) -> int:
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0
    is_plain = text.isprintable() and '"' not in text and "\\" not in text
    return len(text) if is_plain and len(text) < 256 else 0


def _kind(char: str) -> str:
    if not char.isascii():
        return "é"
    return "a" if char.islower() else "A" if char.isupper() else "0" if char.isdigit() else char
