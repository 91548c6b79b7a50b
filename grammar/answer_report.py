"""`GuidedAnswer`: what an answer says about its grammar: how often it was overruled, and where it was cut.

The scheduler counts tokens and positions (`GrammarUsage`). Text and JSON pointers are made of them here, in the
tokenizer manager, and only for the two tokens that are reported.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence

import msgspec

from ..models.tokenizer.tokenizer import Tokenizer
from ..runtime.grammar_use import GrammarKind, GrammarUse
from ..runtime.messages import Finish, FinishKind, GrammarUsage
from .schema.report import pointer_to


class OverruledToken(msgspec.Struct, frozen=True):
    """A token that a grammar refused.

    Attributes:
        at: JSON pointer of the value that it would have been a part of; None where the answer is not JSON of a schema.
        wanted: the text of the refused token.
        got: the text of the token that the answer has instead.
    """

    at: str | None
    wanted: str
    got: str


class GrammarReport(msgspec.Struct, frozen=True):
    """Cost of a grammar, and how often it changed the answer.

    Attributes:
        compile_ms: time to compile it; 0 if it was compiled already.
        mask_us: time for masks and checks.
        forced_tokens: tokens that were the only ones that the grammar allowed.
        overruled_tokens: tokens that replace one that the model would have taken, and that the grammar refused.
        first_overruled: the first of these.
    """

    compile_ms: float
    mask_us: int
    forced_tokens: int
    overruled_tokens: int
    first_overruled: OverruledToken | None


class Truncated(msgspec.Struct, frozen=True, omit_defaults=True):
    """A JSON answer that is shorter than the model would have made it, because of its limit of tokens.

    Attributes:
        at: JSON pointer of the value at which it was cut.
        forced_tokens: the tokens from there on, which complete it.
        complete: it is JSON. False where no end within the limit was found, so that it ends in the middle.
    """

    at: str | None
    forced_tokens: int
    complete: bool = True


class GuidedAnswer:
    """Collects the tokens of one answer with a grammar."""

    __slots__ = ("_finish", "_first", "_num_tokens", "_token_ids", "_usage", "_use")

    def __init__(self, use: GrammarUse) -> None:
        """Begin an answer; `use`: of its request."""
        self._use = use
        self._token_ids = array("i")
        self._usage: GrammarUsage | None = None
        self._num_tokens = 0
        self._finish: Finish | None = None
        self._first: OverruledToken | None = None

    def read(
        self, token_ids: bytes, usage: GrammarUsage | None, num_tokens: int, finish: Finish | None
    ) -> None:
        """Take a row.

        Args:
            token_ids: [n] int32, new tokens.
            usage: of the row.
            num_tokens: of the answer so far.
            finish: in the last row.
        """
        self._token_ids.frombytes(token_ids)
        self._usage = usage or self._usage
        self._num_tokens = num_tokens
        self._finish = finish

    def report(self, tokenizer: Tokenizer) -> GrammarReport | None:
        """The figures so far; None before the grammar is ready."""
        usage = self._usage
        if usage is None:
            return None
        first = usage.first_overruled
        if self._first is None and first is not None:
            wanted, got = _text(tokenizer, (first.wanted_id,)), _text(tokenizer, (first.got_id,))
            self._first = OverruledToken(self._pointer(first.position, tokenizer), wanted, got)
        return GrammarReport(
            round(usage.compile_s * 1e3, 3),
            round(usage.mask_s * 1e6),
            usage.forced_tokens,
            usage.overruled_tokens,
            self._first,
        )

    def truncated(self, tokenizer: Tokenizer) -> Truncated | None:
        """Position at which a finished answer was cut; None if it was not, or was not to be complete."""
        usage, finish = self._usage, self._finish
        if finish is None or finish.kind is not FinishKind.LENGTH:
            return None
        if finish.matched is None:
            if not self._use.complete or self._is_json(tokenizer):
                return None
            return Truncated(self._pointer(self._num_tokens, tokenizer), 0, complete=False)
        if usage is None or usage.cut_at is None:
            return None
        return Truncated(self._pointer(usage.cut_at, tokenizer), self._num_tokens - usage.cut_at)

    def _is_json(self, tokenizer: Tokenizer) -> bool:
        text = self._answer(self._num_tokens, tokenizer)
        try:
            json.loads(text or "")
        except (ValueError, RecursionError):
            return False
        return True

    def _pointer(self, position: int, tokenizer: Tokenizer) -> str | None:
        """The place of the `position`-th token in the JSON of the answer; None if there is no JSON of a schema."""
        text = self._answer(position, tokenizer)
        return None if text is None else pointer_at_end(text)

    def _answer(self, num_tokens: int, tokenizer: Tokenizer) -> str | None:
        """The JSON of the first tokens of the answer, without the reasoning; None if there is none."""
        use = self._use
        if use.spec is None or use.spec.kind is not GrammarKind.JSON_SCHEMA:
            return None
        text = _text(tokenizer, self._token_ids[:num_tokens])
        if use.reasoning is not None:
            begin, end = (
                marker.decode(errors="replace") for marker in (use.reasoning.begin, use.reasoning.end)
            )
            _, found, answer = text.partition(end)
            if not found and (use.reasoning.opened or text.lstrip().startswith(begin)):
                return None
            text = answer if found else text
        return text


def merged(reports: Sequence[GrammarReport]) -> GrammarReport | None:
    """The totals of several answers, with the first overruled token of the first one that has one."""
    if not reports:
        return None
    return GrammarReport(
        round(sum(each.compile_ms for each in reports), 3),
        sum(each.mask_us for each in reports),
        sum(each.forced_tokens for each in reports),
        sum(each.overruled_tokens for each in reports),
        next((each.first_overruled for each in reports if each.first_overruled is not None), None),
    )


def _text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(list(token_ids), skip_special_tokens=False)


class _Container:
    """An open object or list; `step`: the name or index of the value at the end, None between values of an object."""

    __slots__ = ("is_object", "name", "step")

    def __init__(self, is_object: bool) -> None:
        self.is_object = is_object
        self.name = ""  # of an object: the last string that may be a name, with its quotes
        self.step: str | int | None = None if is_object else 0


def pointer_at_end(text: str) -> str:
    """The JSON pointer of the value that the end of a JSON text is in or directly before.

    Between the members of an object it is that of the object. The text is taken for the beginning of a JSON document.
    """
    open_: list[_Container] = []
    string_start: int | None = None
    is_escaped = False
    for position, char in enumerate(text):
        if string_start is not None:
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == '"':
                if open_:
                    open_[-1].name = text[string_start : position + 1]
                string_start = None
        elif char == '"':
            string_start = position
        elif char in "{[":
            open_.append(_Container(char == "{"))
        elif char in "}]":
            if open_:
                open_.pop()
        elif char == ":" and open_:
            open_[-1].step = _parsed(open_[-1].name)
        elif char == "," and open_:
            inner = open_[-1]
            inner.step = None if inner.is_object or not isinstance(inner.step, int) else inner.step + 1
    return pointer_to("", *(each.step for each in open_ if each.step is not None))


def _parsed(name: str) -> str:
    try:
        value = json.loads(name)
    except ValueError:
        return name
    return value if isinstance(value, str) else name
