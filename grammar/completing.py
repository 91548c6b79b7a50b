"""`CompletingMatcher`: keeps a JSON answer completable within the tokens that are left to its request.

    many tokens left       the grammar's masks; the path is looked up again each time half of the slack is used
    slack <= RESERVE       near the cut: a token is allowed if the path after it fits in the tokens that are left
    slack == 0             thus only the tokens of the path (or of another one as short) are allowed

The path is the result of `shortest_end`, the slack is the number of tokens left minus its length. Where the search
finds no path, the grammar's masks stay as they are. One token that adds more than RESERVE tokens to the path is not
foreseen.
"""

# Shapes: V tokens of the model's vocabulary, W = ceil(V / 32) words of a mask.

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from .backend import MaskRow, Matcher, MatcherErrorCode, Vocabulary
from .closing import JsonState, closing_tokens, shortest_end
from .markers import allow

RESERVE: Final = 64
"""Tokens of slack from which on each token is checked: more than one token adds to the path in common schemas."""
MAX_CHECKED_TOKENS: Final = 256
"""Tokens of a mask that are checked one by one, the lowest ids; the others are removed."""
FREE_TEXT_TOKENS: Final = 64
"""A string that may end, and that may go on with more tokens than these, is taken for free text."""
MAX_SEARCHED_TOKENS: Final = 1024
"""Limit over all searches of one mask: 10 to 20 ms."""
MIN_SLACK_TO_TRUST_PATH: Final = 8
"""With more slack, a path is taken as valid after a token if this many of its first tokens are."""
FIRST_SEARCH_TOKENS: Final = 512
"""The path is looked up for the first time with so many tokens left, or after half of the tokens if they are more."""


class CompletingMatcher:
    """A `Matcher` around that of a JSON grammar.

    Attributes:
        is_cut: tokens have been refused because the answer would not have become complete after them.
    """

    wants_mask = True

    def __init__(self, inner: Matcher, vocabulary: Vocabulary, num_left: int, text: bytes = b"") -> None:
        """Wrap a matcher.

        Args:
            inner: belongs to this object.
            vocabulary: of the matcher.
            num_left: tokens that the request may still generate.
            text: what `inner` has accepted already.
        """
        self._inner = inner
        self._vocabulary = vocabulary
        self._num_left = num_left
        self._state = JsonState()
        self._state.read(text)
        self._path: list[int] | None = None
        self._is_near = False  # the path is known, and each token is checked
        self._search_at = min(
            num_left, max(num_left // 2, FIRST_SEARCH_TOKENS)
        )  # tokens left at the next search
        self._restricted = False  # a mask of this state lacks tokens of the grammar
        self.is_cut = False
        self._search()

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @property
    def error(self) -> str:
        return self._inner.error

    @property
    def error_code(self) -> MatcherErrorCode | None:
        return self._inner.error_code

    @property
    def num_forced(self) -> int:
        return self._inner.num_forced

    def limit(self, num_tokens: int) -> None:
        """The limit of this class is given to its constructor."""

    def fill(self, mask: MaskRow) -> None:
        """Write the tokens that may come next; see `Matcher.fill`."""
        self._inner.fill(mask)
        if self._is_near and not self._inner.ended and not self._inner.error:
            self._restrict(mask)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over generated tokens; see `Matcher.accept`."""
        for count, token_id in enumerate(token_ids):
            num_accepted = self._inner.accept((token_id,))
            if not num_accepted or self._inner.error:
                return count + num_accepted
            self._num_left -= 1
            self.is_cut = self.is_cut or self._restricted
            self._restricted = False
            if self._inner.ended:
                continue
            tokens = self._vocabulary.tokens
            self._state.read(tokens[token_id] if token_id < len(tokens) else b"")
            if self._is_near:
                self._follow(token_id)
            else:
                self._search()
        return len(token_ids)

    def allows(self, token_id: int) -> bool:
        """Whether `fill` would allow this token; see `Matcher.allows`."""
        if not self._inner.allows(token_id):
            return False
        if not self._is_near or self._inner.ended or self._inner.error or self._fits(token_id):
            return True
        self._restricted = True
        return False

    def validate(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens that may come next; no effects but that a refused one makes the answer cut."""
        num_valid = self._inner.validate(token_ids)
        if not self._is_near and self._num_left - num_valid > self._search_at:
            return num_valid
        ahead = self.copy()
        for count, token_id in enumerate(token_ids[:num_valid]):
            if not ahead._fits(token_id):
                self._restricted = self._restricted or count == 0
                return count
            ahead.accept((token_id,))
        return num_valid

    def forced(self) -> list[int]:
        return self._inner.forced()

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        """Write the masks before, between and after drafts; see `Matcher.fill_drafts`."""
        if not self._is_near and self._num_left - len(draft_ids) > self._search_at:
            self._inner.fill_drafts(draft_ids, masks)
            return
        self.fill(masks[0])
        ahead = self.copy()
        for index, token_id in enumerate(draft_ids):
            ahead.accept((token_id,))
            ahead.fill(masks[1 + index])
        self._restricted = self._restricted or ahead.is_cut or ahead._restricted

    def copy(self) -> CompletingMatcher:
        """An independent matcher in the same state."""
        twin = copy.copy(self)
        twin._inner = self._inner.copy()
        twin._state = self._state.copy()
        twin._path = None if self._path is None else list(self._path)
        return twin

    # ------------------------------------------------------------ the path

    def _search(self) -> None:
        """Search the path if it is time, and plan the next time."""
        if self._num_left > self._search_at or self._inner.ended or self._inner.error:
            return
        self._path = shortest_end(self._inner, self._vocabulary, self._state, self._num_left)
        if self._path is None:
            self._search_at = self._num_left - max(1, self._num_left // 8)
            return
        slack = self._num_left - len(self._path)
        self._is_near = slack <= RESERVE
        self._search_at = self._num_left - max(1, (slack - RESERVE) // 2)

    def _follow(self, token_id: int) -> None:
        """The path after a token near the cut: its rest, the same one, or a new one."""
        path = self._path
        if path and path[0] == token_id:
            del path[0]
        elif path is None or not self._leads_to_end(path):
            self._is_near, self._search_at = False, self._num_left
            self._search()

    def _leads_to_end(self, path: list[int]) -> bool:
        """Whether the path that was valid before the last token is so after it, and fits."""
        if len(path) > self._num_left or self._inner.validate(path) < len(path):
            return False
        eos = self._vocabulary.eos_token_ids[:1]
        return not eos or self._inner.validate([*path, *eos]) == len(path) + 1 or self._ends_after(path)

    def _ends_after(self, path: list[int]) -> bool:
        ahead = self._inner.copy()
        ahead.accept(path)
        return ahead.ended

    def _surely_fits(self, token_id: int) -> bool:
        """Whether the same path is valid after a token; one call of the library instead of a search."""
        path = self._path
        if not path or path[0] == token_id:
            return path is not None and bool(path)
        slack = self._num_left - len(path)
        if slack <= 0:
            return False
        checked = (
            path[:MIN_SLACK_TO_TRUST_PATH]
            if slack > MIN_SLACK_TO_TRUST_PATH
            else [*path, *self._vocabulary.eos_token_ids[:1]]
        )
        return self._inner.validate([token_id, *checked]) > len(checked)

    def _fits(self, token_id: int) -> bool:
        """Whether the answer can become complete after a token that the grammar allows."""
        if not self._is_near or self._path is None or token_id in self._vocabulary.eos_token_ids:
            return True
        if self._path and self._path[0] == token_id:
            return True
        left = self._num_left - 1
        ahead = self._inner.copy()
        if left < 0 or not ahead.accept((token_id,)):
            return False
        if ahead.ended:
            return True
        state = self._state.copy()
        tokens = self._vocabulary.tokens
        state.read(tokens[token_id] if token_id < len(tokens) else b"")
        return shortest_end(ahead, self._vocabulary, state, left) is not None

    def _restrict(self, mask: MaskRow) -> None:
        """Remove the tokens after which the path does not fit."""
        token_ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if len(token_ids) > FREE_TEXT_TOKENS and self._may_end_string():
            self._restrict_string(mask)
            return
        first = token_ids[:MAX_CHECKED_TOKENS].tolist()
        if self._path and self._path[0] not in first:
            first.append(self._path[0])
        num_searches = MAX_SEARCHED_TOKENS // max(1, self._num_left)
        kept, does_one_not_fit = [], False
        for token_id in first:
            fits = self._surely_fits(token_id)
            if not fits and num_searches > 0:
                num_searches -= 1
                fits = self._fits(token_id)
                does_one_not_fit = does_one_not_fit or not fits
            if fits:
                kept.append(token_id)
        if kept:  # tokens that were only not checked do not make the answer one that was cut
            self._restricted = self._restricted or does_one_not_fit
            _allow_only(mask, kept)

    def _may_end_string(self) -> bool:
        """Whether the position is in a string, and the path begins with its end."""
        state = self._state
        if not self._path or not state.in_string or state.escape_len or state.utf8_len:
            return False
        if state.is_name and self._num_left - len(self._path) <= RESERVE // 2:
            return False  # a name may require a long value
        return self._vocabulary.tokens[self._path[0]] == b'"'

    def _restrict_string(self, mask: MaskRow) -> None:
        """In a string that may end: its end, or, if there is slack, whole characters, which do not add to the path."""
        assert self._path
        if self._num_left > len(self._path):
            mask &= closing_tokens(self._vocabulary).plain
            allow(mask, self._path[0])
        else:
            self._restricted = True
            _allow_only(mask, self._path[:1])


def _allow_only(mask: MaskRow, token_ids: Sequence[int]) -> None:
    mask.fill(0)
    for token_id in token_ids:
        allow(mask, token_id)
