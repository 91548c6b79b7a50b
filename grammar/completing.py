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
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .backend import MaskRow, Matcher, MatcherErrorCode, Vocabulary
from .closing import closing_tokens, leads_to_end, shortest_end
from .json_state import JsonState
from .markers import allow, allows

_MORE: Final = 6
"""Tokens that a token can add to the path beside the values that it begins: the rest of an escape, of a character."""
_MAX_SEARCHED: Final = 1024
"""Most tokens of a path that is searched: a string with a pattern may have no end that the search finds."""
_MAX_FAR: Final = 64
"""More tokens than the bound of `growth_of` that are left before the path is searched at all."""
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
        self._num_values = (
            position.num_left - 1 - _MORE - len(path)
        ) // growth  # that may be begun in any case
        self._position = position
        self._path = list(path)
        self._vocabulary = vocabulary
        self._ways = _ends_of(self._path)  # tried before searches
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
        num_searches, bits = MAX_SEARCHES, np.zeros(mask.size * 32, np.uint8)
        for group in sorted(self._groups.values(), key=lambda group: (-len(group), group[0])):
            fits = self._is_sure(group)
            if not fits and num_searches > 0 and not self._by_kind:
                num_searches -= 1
                both = {int(group[0]), int(group[-1])}
                fits = all(self._goes_on(each, self._found) or self._finds(each) for each in both)
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
        if self._is_free:
            for count in np.unique(num_chars[num_chars > 0]).tolist():
                groups[count] = token_ids[num_chars == count]
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
        """Whether the tokens of a group fit, as one call of the library for each way tells, or none."""
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
        return shortest_end(ahead, self._vocabulary, state, left)


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
        self._near = growth + _MORE + 1
        self._state = JsonState()
        self._state.read(text)
        self._path: list[int] | None = None
        self._slack = 0  # at least, if the path is known; tokens up to the next search, if it is not
        self._choices: NearChoices | None = None  # at this position
        self._refused: set[int] = set()  # tokens left where a token was refused; shared with copies
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
            self.is_cut = self.is_cut or self._num_left in self._refused
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
            self._refused.add(self._num_left)
        return False

    def validate(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens that may come next; no effects but that a refused one makes the answer cut."""
        num_valid = self._inner.validate(token_ids)
        if not self._comes_near(token_ids[:num_valid]):
            return num_valid
        ahead = self.copy()
        for count, token_id in enumerate(token_ids[:num_valid]):
            choices = ahead._near_choices()
            if choices is not None and not choices.allows(token_id):
                is_split = not allows(choices.grammar_mask, token_id)
                if not (is_split and choices.fits(token_id)):
                    self._refused.add(ahead._num_left)
                    return count
            ahead.accept((token_id,))
        return num_valid

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
            known = next((way for way in (*_ends_of(path), *ways) if self._is_path(way)), None)
        ends_string = bool(path) and self._vocabulary.tokens[path[0]][:1] == b'"'
        is_shorter = known is not None and len(known) < len(path)
        if known is not None and (
            is_shorter or (not num_begun and (ends_string or not self._state.in_string))
        ):
            self._locate(known)
            return
        most = self._num_left if known is None else len(known) - 1
        found = shortest_end(self._inner, self._vocabulary, self._state, most)
        self._locate(known if found is None else found)


def _ends_of(path: list[int]) -> list[list[int]]:
    """A path, and it without its first one or two tokens: a token may stand for them."""
    return [path[k:] for k in range(min(3, len(path)))]
