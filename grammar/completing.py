"""`CompletingMatcher`: keeps a JSON answer completable within the tokens that are left to its request.

    many tokens left       the grammar's masks
    near the cut           a token is allowed if an end of the answer after it fits in the tokens that are left

The path is a short end of the answer (`shortest_end`), the slack is the number of tokens left minus its length. Near
means that one more value that is begun could use up the slack (`growth_of`); a token is searched if it could. Where the
search finds no path, the grammar's masks stay as they are. `NearChoices` decides which tokens are allowed near the cut,
for masks and checks.
"""

# Shapes: V tokens of the model's vocabulary, W = ceil(V / 32) words of a mask.

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from .backend import MaskRow, Matcher, MatcherErrorCode, Vocabulary
from .closing import leads_to_end, shortest_end
from .json_state import JsonState
from .markers import allows
from .near_choices import MORE, NearChoices, Position, ends_of

_MAX_SEARCHED: Final = 1024
"""Most tokens of a path that is searched: a string with a pattern may have no end that the search finds."""
_MAX_FAR: Final = 64
"""More tokens than the bound of `growth_of` that are left before the path is searched at all."""


class CompletingMatcher:
    """A `Matcher` around that of a JSON grammar.

    Attributes:
        is_cut: the model's token was refused because the answer would not have become complete after it.
    """

    wants_mask = True

    def __init__(
        self,
        inner: Matcher,
        vocabulary: Vocabulary,
        num_left: int,
        growth: int,
        text: bytes = b"",
        path: Sequence[int] | None = None,
    ) -> None:
        """Wrap a matcher.

        Args:
            inner: belongs to this object.
            vocabulary: of the matcher.
            num_left: tokens that the request may still generate.
            growth: of the schema: tokens that the path grows by, at most, with a value that is begun.
            text: what `inner` has accepted already.
            path: an end of the answer, if one is known.
        """
        self._inner = inner
        self._vocabulary = vocabulary
        self._num_left = num_left
        self._growth = growth
        self._near = growth + MORE + 1
        self._state = JsonState()
        self._state.read(text)
        self._path: list[int] | None = None
        self._slack = 0  # at least, if the path is known; tokens up to the next search, if it is not
        self._choices: NearChoices | None = None  # at this position
        self._history = 0  # hash of the accepted tokens
        self._refused: set[int] = (
            set()
        )  # histories after which the model's token was refused; shared with copies
        self.is_cut = False
        self._locate(None if path is None else list(path))

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
        choices = self._near_choices()
        if choices is None:
            self._inner.fill(mask)
        else:
            mask[:] = choices.mask()

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over generated tokens; see `Matcher.accept`."""
        for count, token_id in enumerate(token_ids):
            choices = self._near_choices()
            ways = [] if choices is None else choices.ways_for(token_id)
            num_accepted = self._inner.accept((token_id,))
            if not num_accepted or self._inner.error:
                return count + num_accepted
            self.is_cut = self.is_cut or self._history in self._refused
            self._history = hash((self._history, token_id))
            self._choices = None
            self._num_left -= 1
            if self._inner.ended:
                continue
            was_near, num_begun = self._is_near, self._read(token_id)
            if was_near:
                self._follow(token_id, num_begun, ways)
            elif self._slack <= (0 if self._path is None else self._near) and not self._is_far:
                self._locate(None)
        return len(token_ids)

    def allows(self, token_id: int) -> bool:
        """Whether `fill` would allow this token; see `Matcher.allows`."""
        choices = self._near_choices()
        if choices is None:
            return self._inner.allows(token_id)
        if choices.allows(token_id):
            return True
        if self._inner.allows(token_id):
            self._refused.add(self._history)
        return False

    def validate(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens that may come next. No effects: a draft is not the model's token."""
        num_valid = self._inner.validate(token_ids)
        if not self._comes_near(token_ids[:num_valid]):
            return num_valid
        ahead = self.copy()
        for count, token_id in enumerate(token_ids[:num_valid]):
            choices = ahead._near_choices()
            if choices is not None and not choices.allows(token_id):
                is_split = not allows(choices.grammar_mask, token_id)
                if not (is_split and choices.fits(token_id)):
                    return count
            ahead.accept((token_id,))
        return num_valid

    def end_reasoning(self) -> bool:
        return False

    def forced(self) -> list[int]:
        return self._inner.forced()

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        """Write the masks before, between and after drafts; see `Matcher.fill_drafts`."""
        if not self._comes_near(draft_ids):
            self._inner.fill_drafts(draft_ids, masks)
            return
        self.fill(masks[0])
        ahead = self.copy()
        for index, token_id in enumerate(draft_ids):
            ahead.accept((token_id,))
            ahead.fill(masks[1 + index])

    def copy(self) -> CompletingMatcher:
        """An independent matcher in the same state."""
        twin = copy.copy(self)
        twin._inner = self._inner.copy()
        twin._state = self._state.copy()
        return twin

    # ------------------------------------------------------------ the path

    @property
    def _is_near(self) -> bool:
        return self._path is not None and self._slack <= self._near

    def _near_choices(self) -> NearChoices | None:
        """The choices at this position; None where the grammar's masks hold."""
        if self._path is None or not self._is_near or self._inner.ended or self._inner.error:
            return None
        if self._choices is None:
            # Copies of this matcher share the choices, and this matcher may go on before they do.
            position = Position(self._inner.copy(), self._state.copy(), self._num_left)
            self._choices = NearChoices(position, self._path, self._vocabulary, self._growth)
        return self._choices

    @property
    def _is_far(self) -> bool:
        """Whether the path fits with slack even if all that is open needs as much as a value can need."""
        return self._num_left > (self._state.depth + 2) * self._growth + _MAX_FAR

    def _read(self, token_id: int) -> int:
        """Read a token and take the most by which it makes the slack smaller; returns the values that it begins."""
        state, tokens = self._state, self._vocabulary.tokens
        before = state.num_begun
        state.read(tokens[token_id] if token_id < len(tokens) else b"")
        num_begun = state.num_begun - before
        self._slack -= 1 + num_begun * self._growth
        return num_begun

    def _comes_near(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the positions before, between and after these tokens may be near the cut."""
        if self._is_near:
            return True
        ahead = copy.copy(self)
        ahead._state = self._state.copy()
        for token_id in token_ids:
            ahead._read(token_id)
            ahead._num_left -= 1
        return ahead._slack <= (0 if self._path is None else self._near) and not ahead._is_far

    def _locate(self, path: list[int] | None) -> None:
        """Take a path, or search it, and find out whether the position is near the cut."""
        if path is None and not self._inner.ended and not self._inner.error:
            most = min(self._num_left, _MAX_SEARCHED)
            path = shortest_end(self._inner, self._vocabulary, self._state, most)
        self._path = path
        self._slack = max(1, self._num_left // 8) if path is None else self._num_left - len(path)

    def _is_path(self, way: list[int]) -> bool:
        return len(way) <= self._num_left and leads_to_end(self._inner, self._vocabulary, way)

    def _follow(self, token_id: int, num_begun: int, ways: Sequence[list[int]]) -> None:
        """The path after a token near the cut: the same one, its rest, one of `ways`, or a shorter new one."""
        path = self._path
        assert path is not None
        known = None
        if path[:1] == [token_id]:
            known = path[1:]
        else:
            known = next((way for way in (*ends_of(path), *ways) if self._is_path(way)), None)
        ends_string = bool(path) and self._vocabulary.tokens[path[0]][:1] == b'"'
        is_shorter = known is not None and len(known) < len(path)
        if known is not None and (
            is_shorter or (not num_begun and (ends_string or not self._state.in_string))
        ):
            self._locate(known)
            return
        most = self._num_left if known is None else len(known) - 1
        found = shortest_end(self._inner, self._vocabulary, self._state, most, path)
        self._locate(known if found is None else found)
