"""`GuidedMatcher`: the matcher of a request: a reasoning block first, then one grammar, or free text with triggers.

    START ----> BLOCK ----> GRAMMAR            with a grammar for the whole answer
      |           |            ^
      +-----------(------------+
      |           v
      +-------> FREE <----> TRIGGERED          without one

All markers are matched on bytes, because a marker may begin and end within tokens. Text after a marker in the same
token is fed to the grammar byte by byte, through the tokens of single bytes: a grammar accepts or refuses a text
independent of its split into tokens. A mask cannot express a part of a token, so that masks of a block exclude tokens
with text after the end marker.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Sequence
from typing import Final

import numpy.typing as npt
from numpy import int32

from ..runtime.grammar_use import GrammarUse, ReasoningBlock
from .backend import CompiledGrammar, MaskRow, Matcher, MatcherErrorCode, Vocabulary
from .markers import MarkerTable, allow, marker_table

_WHITESPACE: Final = b" \t\r\n"


class Phase(enum.Enum):
    """Where in the answer the matcher is; see the drawing above.

    START: the answer may begin with a reasoning block. BLOCK: inside it.
    """

    START = enum.auto()
    BLOCK = enum.auto()
    GRAMMAR = enum.auto()
    FREE = enum.auto()
    TRIGGERED = enum.auto()


class GuidedMatcher:
    """A `Matcher` for one request.

    A triggered grammar is complete when nothing can follow its text; a grammar that can always be continued never
    returns to free text.

    Attributes:
        phase: where in the answer it is.
        ended: see `Matcher`.
        error: see `Matcher`.
        error_code: see `Matcher`.
    """

    def __init__(self, use: GrammarUse, compiled: Sequence[CompiledGrammar], vocabulary: Vocabulary) -> None:
        """Begin an answer.

        Args:
            use: of the request.
            compiled: the grammars, in the order of `use.specs`.
            vocabulary: that the grammars were compiled for; hashable by identity.
        """
        self._use = use
        self._grammar = compiled[0] if use.spec is not None else None
        self._triggered = tuple(compiled[len(compiled) - len(use.triggered) :])
        self._vocabulary = vocabulary
        self._eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self._tail_len = max((len(each.trigger) for each in use.triggered), default=1) - 1
        self._inner: Matcher | None = None
        self._held = b""  # START: the text so far
        self._marker_state = 0  # BLOCK: bytes of the end marker that the text ends with
        self._num_block_tokens = 0
        self._end_tokens: tuple[
            int, ...
        ] = ()  # BLOCK: the tokens that must follow, once the budget is used up
        self._tail = b""  # FREE: the last bytes, which may be the beginning of a trigger
        self.ended = False
        self.error = ""
        self.error_code: MatcherErrorCode | None = None
        if use.reasoning is None:
            self._begin_answer(b"")
        elif use.reasoning.opened:
            self._begin_block(b"")
        else:
            self.phase = Phase.START
            self._inner = None if self._grammar is None else self._grammar.matcher()

    @property
    def wants_mask(self) -> bool:
        """Whether the next token is constrained."""
        match self.phase:
            case Phase.GRAMMAR | Phase.TRIGGERED:
                return True
            case Phase.START:
                return self._grammar is not None
            case Phase.BLOCK:
                return self._grammar is not None or bool(self._end_tokens)
            case Phase.FREE:
                return False

    # ------------------------------------------------------------ masks

    def fill(self, mask: MaskRow) -> None:
        """Write the tokens that may come next; see `Matcher.fill`."""
        if self._is_over() or not self.wants_mask:
            mask.fill(-1)
        elif self.phase is Phase.START:
            self._fill_start(mask)
        elif self.phase is Phase.BLOCK:
            mask.fill(0)
            if self._end_tokens:
                allow(mask, self._end_tokens[0])
            else:
                row = self._end_table.open_row(self._marker_state)
                mask[: row.size] = row
        elif self._inner is not None:
            self._inner.fill(mask)
            self._read_inner_error()

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[int32]) -> None:
        """Write the masks before, between and after drafts; see `Matcher.fill_drafts`."""
        if self.phase is Phase.GRAMMAR and self._inner is not None:
            self._inner.fill_drafts(draft_ids, masks)
            self._read_inner_error()
            return
        self.fill(masks[0])
        if not draft_ids:
            return
        ahead = self.copy()
        for index, token_id in enumerate(draft_ids):
            ahead.accept((token_id,))
            ahead.fill(masks[1 + index])

    def forced(self) -> list[int]:
        """The tokens that must come next, if they are known."""
        if self._is_over():
            return []
        if self.phase is Phase.BLOCK:
            return list(self._end_tokens)
        if self._inner is not None and self.phase is not Phase.START:
            return self._inner.forced()
        return []

    def _fill_start(self, mask: MaskRow) -> None:
        """What the grammar allows, and the tokens that spell the marker that opens a block."""
        mask.fill(0)
        if self._inner is not None:
            self._inner.fill(mask)
            if self._inner.error:
                mask.fill(0)
        tokens, begin = self._vocabulary.tokens, self._block.begin
        missing = len(begin) - self._num_begin_bytes
        for token_id in self._begin_table.continuations[self._num_begin_bytes]:
            inside = tokens[token_id][missing:]
            end = self._end_table.search.advance(0, inside)[1]
            if end < 0 or end == len(inside):
                allow(mask, token_id)
        if not mask.any():
            self._fail("no token is allowed")
            mask.fill(-1)

    # ------------------------------------------------------------ tokens

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, without effects."""
        if self._is_over():
            return 0
        if self.phase is Phase.GRAMMAR and self._inner is not None:
            return self._inner.validate(token_ids)
        return self.copy().accept(token_ids)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over generated tokens; see `Matcher.accept`."""
        for count, token_id in enumerate(token_ids):
            if self._is_over():
                return count
            if self.phase is Phase.GRAMMAR and self._inner is not None:
                count += self._inner.accept(token_ids[count:])
                self.ended = self._inner.ended
                self._read_inner_error()
                return count
            if token_id in self._eos_token_ids:
                self._accept_eos(token_id)
            else:
                self._accept_text(token_id)
            if self.error:
                return count
        return len(token_ids)

    def copy(self) -> GuidedMatcher:
        """An independent matcher in the same state."""
        twin = copy.copy(self)
        twin._inner = None if self._inner is None else self._inner.copy()
        return twin

    def _accept_eos(self, token_id: int) -> None:
        if self.wants_mask and self.phase is Phase.BLOCK:
            self._fail(f"EOS token {token_id} is refused inside the reasoning block")
        elif self._inner is not None:
            self._inner.accept((token_id,))
            self._read_inner_error()
            self.ended = not self.error
        elif self.wants_mask:
            self._fail(f"EOS token {token_id} is refused in the marker that opens the reasoning block")
        else:
            self.ended = True

    def _accept_text(self, token_id: int) -> None:
        tokens = self._vocabulary.tokens
        data = tokens[token_id] if 0 <= token_id < len(tokens) else b""
        match self.phase:
            case Phase.START:
                self._accept_start(token_id, data)
            case Phase.BLOCK:
                self._accept_in_block(token_id, data)
            case Phase.FREE:
                self._search_triggers(data)
            case Phase.TRIGGERED | Phase.GRAMMAR:
                assert self._inner is not None
                self._inner.accept((token_id,))
                self._read_inner_error()
                if self._inner.ended:
                    self._end_triggered()

    # ------------------------------------------------------------ the reasoning block

    @property
    def _block(self) -> ReasoningBlock:
        assert self._use.reasoning is not None
        return self._use.reasoning

    @property
    def _begin_table(self) -> MarkerTable:
        return marker_table(self._vocabulary, self._block.begin)

    @property
    def _end_table(self) -> MarkerTable:
        return marker_table(self._vocabulary, self._block.end)

    @property
    def _num_begin_bytes(self) -> int:
        """START: the number of bytes of the opening marker so far."""
        return len(self._held.lstrip(_WHITESPACE))

    def _accept_start(self, token_id: int, data: bytes) -> None:
        """Follow the marker and the grammar at the same time, since both may begin with the same bytes."""
        begin = self._block.begin
        self._held += data
        text = self._held.lstrip(_WHITESPACE)
        if text.startswith(begin):
            self._begin_block(text[len(begin) :])
            return
        if self._inner is not None:
            self._inner.accept((token_id,))
            if self._inner.ended:
                self.ended = True
                return
        may_open = begin.startswith(text)
        if self._inner is not None and self._inner.error and may_open:
            self._inner = None
        if may_open:
            return
        if self._grammar is None:
            self._begin_answer(self._held)
        elif self._inner is None:
            self._fail(f"token {token_id} is refused in the marker that opens the reasoning block")
        else:
            self.phase = Phase.GRAMMAR
            self._read_inner_error()

    def _begin_block(self, data: bytes) -> None:
        self.phase = Phase.BLOCK
        self._inner = None
        self._read_block(data)

    def _accept_in_block(self, token_id: int, data: bytes) -> None:
        self._num_block_tokens += 1
        if self._end_tokens:
            if token_id != self._end_tokens[0]:
                self._fail(f"token {token_id} is refused: the reasoning block must end")
                return
            self._end_tokens = self._end_tokens[1:]
        self._read_block(data)

    def _read_block(self, data: bytes) -> None:
        """Look for the end marker; once the budget is used up, the tokens of the rest of it must follow."""
        self._marker_state, end = self._end_table.search.advance(self._marker_state, data)
        if end >= 0:
            self._end_tokens = ()
            self._begin_answer(data[end:])
            return
        budget = self._block.budget
        if budget is not None and self._num_block_tokens >= budget and not self._end_tokens:
            self._end_tokens = self._end_table.next_tokens(self._marker_state)

    # ------------------------------------------------------------ the answer

    def _begin_answer(self, data: bytes) -> None:
        """Begin the grammar or the free text with bytes of the token before."""
        if self._grammar is None:
            self.phase = Phase.FREE
            self._search_triggers(data)
            return
        self.phase = Phase.GRAMMAR
        self._inner = self._grammar.matcher()
        if feed_bytes(self._inner, data, self._vocabulary) < len(data):
            self._fail(f"the text {data!r} after the reasoning block is refused")
        self.ended = self._inner.ended

    def _search_triggers(self, data: bytes) -> None:
        """Read free text; begin the grammar of the trigger that ends first (of several, the longest)."""
        while not self.ended:
            text = self._tail + data
            found = [
                (start + len(each.trigger), -len(each.trigger), index)
                for index, each in enumerate(self._use.triggered)
                if (start := text.find(each.trigger)) >= 0
            ]
            if not found:
                self._tail = text[max(0, len(text) - self._tail_len) :]
                return
            end, _, index = min(found)
            self._tail, data = b"", text[end:]
            inner = self._triggered[index].matcher()
            count = feed_bytes(inner, data, self._vocabulary)
            if count < len(data) and not inner.ended:
                continue  # refused: free text goes on after the trigger
            self.phase, self._inner = Phase.TRIGGERED, inner
            if not inner.ended:
                return
            self._end_triggered()
            data = data[count:]

    def _end_triggered(self) -> None:
        self.phase, self._inner, self._tail = Phase.FREE, None, b""
        self.ended = self._use.ends_after_first

    # ------------------------------------------------------------ errors

    def _is_over(self) -> bool:
        return self.ended or self.error != ""

    def _read_inner_error(self) -> None:
        if self._inner is not None and self._inner.error:
            self.error, self.error_code = self._inner.error, self._inner.error_code

    def _fail(self, text: str) -> None:
        self.error, self.error_code = text, MatcherErrorCode.BUG


def feed_bytes(matcher: Matcher, data: bytes, vocabulary: Vocabulary) -> int:
    """Feed text that is a part of a token; returns the number of bytes that were accepted.

    It stops at the end of the grammar's text. A matcher that has refused a byte has an error.
    """
    singles = _single_bytes(vocabulary)
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
def _single_bytes(vocabulary: Vocabulary) -> dict[int, int]:
    """The text token of each byte that is one."""
    special = vocabulary.special_token_ids
    return {
        token[0]: token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if len(token) == 1 and token_id not in special
    }


def prepare(use: GrammarUse, vocabulary: Vocabulary) -> None:
    """Build the tables of the markers of a request, so that its first step does not wait for them."""
    if use.reasoning is not None:
        table = marker_table(vocabulary, use.reasoning.end)
        if use.spec is not None:
            table.open_row(0)
        if not use.reasoning.opened:
            _ = marker_table(vocabulary, use.reasoning.begin).continuations
    _single_bytes(vocabulary)
