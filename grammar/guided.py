"""`GuidedMatcher`: the matcher of a request: a reasoning block first, then one grammar, or free text with triggers.

    START ----> BLOCK ----> GRAMMAR            with a grammar for the whole answer
      |           |            ^
      +-----------(------------+
      |           v
      +-------> FREE <----> TRIGGERED          without one

All markers are matched on bytes, because a marker may begin and end within tokens; see `markers`.

A model may begin a call without closing its reasoning. In BLOCK a grammar follows the text after the marker of a call,
without a mask; text that it takes for `_SURE_BYTES` is a call, and ends the block.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy import int32

from ..runtime.grammar_use import GrammarKind, GrammarUse, ReasoningBlock
from .backend import CompiledGrammar, MaskRow, Matcher, MatcherErrorCode, Vocabulary
from .closing import closing_tokens, leads_to_end
from .completing import CompletingMatcher
from .markers import (
    BlockOpening,
    OpenBlock,
    TriggerSearch,
    feed_bytes,
    marker_table,
    marker_tokens,
    single_bytes,
)
from .schema.growth import growth_of

_SURE_BYTES: Final = 8


class Phase(enum.Enum):
    """Position of the matcher in the answer; see the drawing above.

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
            vocabulary: that the grammars were compiled for.
        """
        self._use = use
        self._grammar = compiled[0] if use.spec is not None else None
        self._triggered = tuple(compiled[len(compiled) - len(use.triggered) :])
        self._triggers = TriggerSearch([each.trigger for each in use.triggered])
        self._vocabulary = vocabulary
        self._eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self._opening: BlockOpening | None = None  # in START
        self._block: OpenBlock | None = None  # in BLOCK
        self._inner: Matcher | None = (
            None  # in GRAMMAR, TRIGGERED, and in START while the grammar takes the text
        )
        self._num_left: int | None = None  # of the limit, if there is one; up to the beginning of the grammar
        self._shortest: Sequence[int] | None = None  # a short answer of the grammar, if there is a limit
        self._tail = b""  # the last bytes: those that may begin a trigger, or in BLOCK all that `_call` took
        self._calls = TriggerSearch(() if use.reasoning is None else use.reasoning.calls)
        self._call: Matcher | None = None  # in BLOCK: has taken the text since a call's marker
        self._num_forced_before = 0  # in triggered grammars that have ended
        self.ended = False
        self.error = ""
        self.error_code: MatcherErrorCode | None = None
        if use.reasoning is None:
            self._begin_answer(b"")
        elif use.reasoning.opened:
            self._begin_block(b"")
        else:
            self.phase = Phase.START
            self._opening = BlockOpening(use.reasoning, vocabulary)
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
                return self._grammar is not None or (self._block is not None and self._block.end_tokens != ())
            case Phase.FREE:
                return False

    @property
    def is_cut(self) -> bool:
        """Whether the limit has left out a part of the answer."""
        return self._inner is not None and self._inner.is_cut

    @property
    def num_forced(self) -> int:
        return self._num_forced_before + (0 if self._inner is None else self._inner.num_forced)

    def limit(self, num_tokens: int) -> None:
        """Let the answer become complete within this many further tokens; see `Matcher.limit`.

        The reasoning leaves the tokens of a short answer, whatever its budget is.
        """
        if self._grammar is None:
            return
        self._shortest = self._short_answer(self._grammar)
        need = 0 if self._shortest is None else len(self._shortest)
        num_marker = 0 if self._block is None else self._block.num_end_tokens
        if need + num_marker > num_tokens:
            self._refuse_limit(num_tokens, need, num_marker)
            return
        self._num_left = num_tokens
        if self._block is not None:
            self._bound_block(self._block)
        elif self._inner is not None:
            self._inner = self._completing(self._inner, b"")

    def _short_answer(self, grammar: CompiledGrammar) -> Sequence[int] | None:
        """The tokens of a short answer of the grammar: one measure for all uses of the limit."""
        if self._use.shortest:
            split = self._vocabulary.encode(self._use.shortest.encode())
            if leads_to_end(grammar.matcher(), self._vocabulary, split):
                return split
        return grammar.short_answer

    def _completing(self, inner: Matcher, data: bytes) -> Matcher:
        """The matcher of the answer, which has accepted `data`, as it is near the limit."""
        if not self._use.complete or self._num_left is None or self._use.spec is None:
            return inner
        growth = growth_of(self._use.spec.text)
        path = None if data else self._shortest
        return CompletingMatcher(inner, self._vocabulary, self._num_left, growth, data, path)

    def _bound_block(self, block: OpenBlock) -> None:
        """Let the reasoning block end where the tokens for a short answer begin."""
        if self._num_left is not None and self._shortest is not None:
            block.bound(self._num_left - len(self._shortest))

    def _may_reason(self, reasoning: ReasoningBlock) -> bool:
        """Whether a block that is not open yet leaves room for a short answer, however its marker is spelled."""
        if self._num_left is None or self._shortest is None:
            return True
        num_tokens = len(reasoning.begin) + marker_table(self._vocabulary, reasoning.end).most_tokens
        return num_tokens + len(self._shortest) <= self._num_left

    def _refuse_limit(self, num_tokens: int, need: int, num_marker: int) -> None:
        marker = f", and the end of the reasoning has {num_marker}" if num_marker else ""
        rule = f"the shortest answer has {need} tokens{marker}, but the answer may have {num_tokens}"
        self.error = f"{rule}; raise its limit"
        self.error_code = MatcherErrorCode.TOO_SHORT

    # ------------------------------------------------------------ masks

    def fill(self, mask: MaskRow) -> None:
        """Write the tokens that may come next; see `Matcher.fill`."""
        if self._is_over() or not self.wants_mask:
            mask.fill(-1)
        elif self._opening is not None:
            self._fill_start(mask, self._opening)
        elif self._block is not None:
            self._block.fill(mask)
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

    def end_reasoning(self) -> bool:
        """Let an open reasoning block end with the next token; see `Matcher.end_reasoning`."""
        if self._block is None or self._is_over():
            return False
        self._block.bound(0)
        return True

    def forced(self) -> list[int]:
        """The tokens that must come next, if they are known."""
        if self._is_over() or self._opening is not None:
            return []
        if self._block is not None:
            return list(self._block.end_tokens)
        return [] if self._inner is None else self._inner.forced()

    def _fill_start(self, mask: MaskRow, opening: BlockOpening) -> None:
        """Allow the tokens of the grammar, and those that spell the marker that opens a block."""
        mask.fill(0)
        if self._inner is not None:
            self._inner.fill(mask)
            if self._inner.error:
                mask.fill(0)
        if self._use.reasoning is not None and (opening.text or self._may_reason(self._use.reasoning)):
            opening.allow_marker(mask)
        if not mask.any():
            self._fail("no token is allowed")
            mask.fill(-1)

    def allows(self, token_id: int) -> bool:
        """Whether `fill` would allow this token; see `Matcher.allows`."""
        if self._is_over() or not self.wants_mask:
            return True
        if self._opening is None and self._block is None and self._inner is not None:
            return self._inner.allows(token_id)
        # The phases before and between grammars are short, or fill a mask from a table.
        mask = np.empty(-(-self._vocabulary.size // 32), dtype=np.int32)
        self.fill(mask)
        return 0 <= token_id < self._vocabulary.size and bool(mask[token_id // 32] >> token_id % 32 & 1)

    # ------------------------------------------------------------ tokens

    def validate(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens that may come next. No effects."""
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
                num_accepted = self._inner.accept(token_ids[count:])
                self.ended = self._inner.ended
                self._read_inner_error()
                return count + num_accepted
            if self._num_left is not None:
                self._num_left -= 1
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
        twin._opening = None if self._opening is None else self._opening.copy()
        twin._block = None if self._block is None else self._block.copy()
        twin._inner = None if self._inner is None else self._inner.copy()
        twin._call = None if self._call is None else self._call.copy()
        return twin

    def _accept_eos(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept((token_id,))
            self._read_inner_error()
            self.ended = not self.error
        elif self.wants_mask:
            self._fail(f"EOS token {token_id} is refused in front of the answer")
        else:
            self.ended = True

    def _accept_text(self, token_id: int) -> None:
        tokens = self._vocabulary.tokens
        data = tokens[token_id] if 0 <= token_id < len(tokens) else b""
        if self._opening is not None:
            self._accept_start(token_id, data, self._opening)
        elif self._block is not None:
            if self._block.takes(token_id):
                self._read_block(data, self._block)
                if (
                    self.phase is Phase.BLOCK
                    and self._use.reasoning is not None
                    and self._use.reasoning.calls
                ):
                    self._follow_call(token_id, data)
            else:
                self._fail(f"token {token_id} is refused: the reasoning block must end")
        elif self._inner is not None:
            self._inner.accept((token_id,))
            self._read_inner_error()
            if self._inner.ended:
                self._end_triggered()
        else:
            self._read_free_text(data)

    # ------------------------------------------------------------ the reasoning block

    def _accept_start(self, token_id: int, data: bytes, opening: BlockOpening) -> None:
        """Follow the marker and the grammar at the same time, since both may begin with the same bytes."""
        opening.read(data)
        if opening.rest is not None:
            self._begin_block(opening.rest)
            return
        if self._inner is not None:
            self._inner.accept((token_id,))
            self.ended = self._inner.ended
            if self._inner.error and opening.may_open:
                self._inner = None
        if opening.may_open or self.ended:
            return
        self._opening = None
        if self._grammar is None:
            self._begin_answer(opening.text)
        elif self._inner is None:
            self._fail(f"token {token_id} is refused in the marker that opens the reasoning block")
        else:
            self.phase = Phase.GRAMMAR
            self._read_inner_error()

    def _begin_block(self, data: bytes) -> None:
        assert self._use.reasoning is not None
        self.phase = Phase.BLOCK
        self._opening = self._inner = None
        self._block = OpenBlock(self._use.reasoning, self._vocabulary)
        self._bound_block(self._block)
        self._read_block(data, self._block, num_tokens=0)

    def _read_block(self, data: bytes, block: OpenBlock, num_tokens: int = 1) -> None:
        rest = block.read(data, num_tokens)
        if rest is not None:
            self._block = self._call = None
            self._tail = b""
            self._begin_answer(rest)

    def _follow_call(self, token_id: int, data: bytes) -> None:
        """Follow a call inside the open block. Text that only mentions its marker is soon refused by the grammar."""
        text = self._tail + data
        if self._call is not None:
            self._call.accept((token_id,))
            if not self._call.error:
                self._tail = text
                if self._call.ended or len(text) >= _SURE_BYTES:
                    self._end_block_by_call(self._call)
                return
            self._call = None
        found = self._calls.find(text)
        if found is None:
            self._tail = self._calls.tail(text)
        elif self._use.reasoning is not None:
            self._tail = text[found[1] :]
            self._call = self._matcher_after(self._use.reasoning.calls[found[0]], self._tail)

    def _matcher_after(self, marker: bytes, rest: bytes) -> Matcher | None:
        """The matcher of a call that begins with a marker and some more text; None if it is refused."""
        if self._grammar is not None:
            inner = self._grammar.matcher()
            token_ids = marker_tokens(self._vocabulary, marker)
            if inner.accept(token_ids) < len(token_ids):
                return None
        else:
            matching = [
                each
                for each, use in zip(self._triggered, self._use.triggered, strict=True)
                if use.trigger == marker
            ]
            if not matching:
                return None
            inner = matching[0].matcher()
        return inner if feed_bytes(inner, rest, self._vocabulary) == len(rest) else None

    def _end_block_by_call(self, call: Matcher) -> None:
        self._block = self._call = None
        self._inner = call
        self.phase = Phase.TRIGGERED if self._grammar is None else Phase.GRAMMAR
        if self.phase is Phase.GRAMMAR:
            self.ended = call.ended
        elif call.ended:
            self._end_triggered()

    # ------------------------------------------------------------ the answer

    def _begin_answer(self, data: bytes) -> None:
        """Begin the grammar or the free text with bytes of the token before."""
        if self._grammar is None:
            self.phase = Phase.FREE
            self._read_free_text(data)
            return
        self.phase = Phase.GRAMMAR
        self._inner = self._grammar.matcher()
        if feed_bytes(self._inner, data, self._vocabulary) < len(data):
            self._fail(f"the text {data!r} after the reasoning block is refused")
        else:
            self._inner = self._completing(self._inner, data)
        self.ended = self._inner.ended

    def _read_free_text(self, data: bytes) -> None:
        """Look for triggers; begin the grammar of one that is found."""
        while not self.ended:
            text = self._tail + data
            found = self._triggers.find(text)
            if found is None:
                self._tail = self._triggers.tail(text)
                return
            index, end = found
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
        self._num_forced_before = self.num_forced
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


def prepare(use: GrammarUse, vocabulary: Vocabulary) -> None:
    """Build the tables of the markers of a request (50 ms), so that its first step does not wait for them."""
    if use.reasoning is not None:
        table = marker_table(vocabulary, use.reasoning.end)
        if use.spec is not None:
            table.open_row(0)
        if not use.reasoning.opened:
            _ = marker_table(vocabulary, use.reasoning.begin).continuations
    if use.complete:
        closing_tokens(vocabulary)
        if use.spec is not None and use.spec.kind is GrammarKind.JSON_SCHEMA:
            growth_of(use.spec.text)
    single_bytes(vocabulary)
