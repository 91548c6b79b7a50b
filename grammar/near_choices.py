"""`NearChoices`: the tokens that are allowed at one position of a JSON answer near its limit, for masks and checks."""

# Shapes: V tokens of the model's vocabulary, W = ceil(V / 32) words of a mask.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .backend import MaskRow, Matcher, Vocabulary
from .closing import closing_tokens, leads_to_end, shortest_end
from .json_state import JsonState
from .markers import allow, allows

MORE: Final = 6
"""Tokens that a token can add to the path beside the values that it begins: the rest of an escape, of a character."""
MAX_SEARCHES: Final = 64
"""Searches of one mask. Where they do not suffice, the groups of the most tokens are searched first."""
MAX_SINGLES: Final = 256
"""More tokens that go on with a string of a pattern are grouped by the kinds of their characters, and not searched."""


class Position(NamedTuple):
    """A position in an answer: the matcher, the state of the JSON text, and the tokens that are left."""

    matcher: Matcher
    state: JsonState
    num_left: int


class NearChoices:
    """The tokens that are allowed at one position near the cut.

    Tokens with the same effect on the document are one group, which its first and last token decide: whole characters
    of a string without a pattern by their number, others by their bytes without the blanks around signs.

    Attributes:
        grammar_mask: [W] tokens that the grammar allows.
    """

    def __init__(self, position: Position, path: Sequence[int], vocabulary: Vocabulary, growth: int) -> None:
        """Look at all tokens that the grammar allows.

        Args:
            position: nothing of it is changed.
            path: an end of the answer that fits.
            vocabulary: of the matcher.
            growth: tokens that the path grows by, at most, with a value that is begun.
        """
        slack = position.num_left - 1 - MORE - len(path)
        self._num_values = slack // growth  # that may be begun in any case
        self._position = position
        self._path = list(path)
        self._vocabulary = vocabulary
        self._ways = ends_of(self._path)  # tried before searches
        self._found: list[list[int]] = []  # by searches for `mask`; tried for groups after that
        self.grammar_mask: MaskRow = np.zeros(-(-vocabulary.size // 32), np.int32)
        position.matcher.fill(self.grammar_mask)
        self._is_failed = bool(position.matcher.error)
        token_ids = np.flatnonzero(np.unpackbits(self.grammar_mask.view(np.uint8), bitorder="little"))
        self._groups = self._grouped(token_ids)
        self._mask: MaskRow | None = None

    def allows(self, token_id: int) -> bool:
        """Whether `mask` has this token; computes it only if the token's group does not go on with a known way."""
        if self._mask is None and allows(self.grammar_mask, token_id):
            group = self._groups.get(self._key_of(token_id), ())
            if len(group) and self._is_sure(group):
                return True
        return allows(self.mask(), token_id)

    def fits(self, token_id: int) -> bool:
        """Whether the answer can end in time after a token that the grammar takes, but has no bit in its mask.

        Where only one text may follow, masks have the tokenizer's split of it, and not the others.
        """
        return self._goes_on(token_id, self._ways) or self._search(token_id) is not None

    def ways_for(self, token_id: int) -> list[list[int]]:
        """The ways by which a token is allowed, beside the path: the same ones after masks, checks and drafts."""
        group = self._groups.get(self._key_of(token_id), ()) if allows(self.grammar_mask, token_id) else ()
        if not len(group) or self._is_sure(group):
            return []
        self.mask()
        return self._found

    def mask(self) -> MaskRow:
        """[W] the tokens that are allowed; read-only."""
        if self._mask is None:
            self._mask = self._allowed()
            self._mask.setflags(write=False)
        return self._mask

    def _allowed(self) -> MaskRow:
        if self._is_failed:
            return self.grammar_mask
        mask = np.zeros_like(self.grammar_mask)
        num_searches, bits, is_short = MAX_SEARCHES, np.zeros(mask.size * 32, np.uint8), False
        for key, group in sorted(self._groups.items(), key=_order):
            fits = self._is_sure(group)
            counts = isinstance(key, int)
            if not fits and num_searches > 0 and not self._by_kind and not (counts and is_short):
                num_searches -= 1
                both = {int(group[0]), int(group[-1])}
                fits = all(self._goes_on(each, self._found) or self._finds(each) for each in both)
            is_short = is_short or (counts and not fits)  # fewer characters do not fit either
            if fits:
                bits[group] = 1
        mask |= np.packbits(bits, bitorder="little").view(np.int32)
        if self._path and (allows(self.grammar_mask, self._path[0]) or not mask.any()):
            allow(mask, self._path[0])
        return mask if mask.any() else self.grammar_mask

    # ------------------------------------------------------------ groups

    def _grouped(self, token_ids: npt.NDArray[np.intp]) -> dict[object, npt.NDArray[np.intp]]:
        tables, state = closing_tokens(self._vocabulary), self._position.state
        num_chars = tables.num_chars[token_ids]
        num_plain = int(np.count_nonzero(num_chars))
        in_text = state.in_string and not state.escape_len and not state.utf8_len
        most = int(num_chars.max(initial=0))
        self._is_free = in_text and num_plain > 0 and num_plain == tables.num_up_to[most]
        self._by_kind = in_text and not self._is_free and num_plain > MAX_SINGLES
        groups: dict[object, npt.NDArray[np.intp]] = {}
        if self._is_free:  # then the grammar allows all tokens of up to `most` characters
            counts = range(1, most + 1)
            groups.update({n: group for n in counts if len(group := tables.of_num_chars[n])})
            token_ids = token_ids[num_chars == 0]
        position = self._is_free, self._by_kind, state.kind
        groups.update(tables.grouped(token_ids, self._key_of, position))
        return groups

    def _key_of(self, token_id: int) -> object:
        """The group of a token that the grammar allows."""
        if token_id in self._vocabulary.eos_token_ids:
            return None
        tables = closing_tokens(self._vocabulary)
        count = int(tables.num_chars[token_id])
        if count and self._is_free:
            return count
        if count and self._by_kind:
            return tables.kinds(token_id), count
        return tables.skeleton(token_id, self._position.state, is_free=self._is_free)

    # ------------------------------------------------------------ ways

    def _is_sure(self, group: Sequence[int] | npt.NDArray[np.intp]) -> bool:
        """Whether the tokens of a group fit, found by at most two calls of the library for each way."""
        first, last = int(group[0]), int(group[-1])
        return self._is_harmless(first) or (
            self._goes_on(first, self._ways) and (first == last or self._goes_on(last, self._ways))
        )

    def _is_harmless(self, token_id: int) -> bool:
        """Whether a token cannot use up the slack, whatever it begins."""
        if token_id in self._vocabulary.eos_token_ids or self._path[:1] == [token_id]:
            return True
        if self._num_values < 0:
            return False
        state, tables = self._position.state, closing_tokens(self._vocabulary)
        # The characters of a name choose the value that follows; those of a pattern or a number its end.
        chooses = state.in_number or (state.in_string and (state.is_name or not self._is_free))
        if not chooses and tables.num_chars[token_id] and state.in_string:
            return True
        num_begun = tables.skeleton(token_id, state, is_free=self._is_free).num_begun
        return num_begun + chooses <= self._num_values

    def _goes_on(self, token_id: int, ways: Sequence[Sequence[int]]) -> bool:
        """Whether one of these ways leads to the end after a token."""
        left, matcher = self._position.num_left - 1, self._position.matcher
        return any(
            len(way) <= left and leads_to_end(matcher, self._vocabulary, [token_id, *way]) for way in ways
        )

    def _finds(self, token_id: int) -> bool:
        """Search a way after a token, and keep it."""
        way = self._search(token_id)
        if way is not None:
            self._found.append(way)
        return way is not None

    def _search(self, token_id: int) -> list[int] | None:
        left, ahead = self._position.num_left - 1, self._position.matcher.copy()
        if left < 0 or not ahead.accept((token_id,)):
            return None
        if ahead.ended:
            return []
        state = self._position.state.copy()
        state.read(self._vocabulary.tokens[token_id])
        return shortest_end(ahead, self._vocabulary, state, left, self._path)


def _order(item: tuple[object, npt.NDArray[np.intp]]) -> tuple[int, int, int]:
    """The groups of characters first, the longest first; then by the number of their tokens."""
    key, group = item
    return (0, -key, 0) if isinstance(key, int) else (1, -len(group), int(group[0]))


def ends_of(path: list[int]) -> list[list[int]]:
    """A path, and it without its first one or two tokens: a token may stand for them."""
    return [path[k:] for k in range(min(3, len(path)))]
