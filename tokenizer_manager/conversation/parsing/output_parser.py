"""`OutputParser`: the text of one answer to deltas, as it arrives.

It holds back only what may become a marker, and its deltas, joined, do not depend on how the text was cut. Trouble
inside a call (a name of no tool, the end of the text) makes its text content, unless its `CallBegin` went out.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Generator, Iterable
from typing import Final

from ..conversation import ReasoningOptions, Tool
from ..deltas import Delta
from .emitter import Emitter, MakeId, random_id
from .families import Form, IdRule, ToolFamily
from .json_calls import read_json_call, read_named_call
from .reasoning_families import ReasoningFamily
from .source import ANYTHING, NAMED_SIGN, Markers, Source, Trouble, Waits
from .tagged_calls import read_pythonic_call, read_tagged_call
from .whole_answers import read_generic, read_harmony

_LETTERS: Final = string.ascii_letters + string.digits
_READERS: Final[dict[Form, Callable[[Source, Emitter, ToolFamily], Waits]]] = {
    Form.JSON: read_json_call,
    Form.NAMED: read_named_call,
    Form.TAGGED: read_tagged_call,
    Form.PYTHONIC: read_pythonic_call,
}


class OutputParser:
    """The parser of one choice."""

    def __init__(
        self,
        family: ToolFamily | None,
        tools: Iterable[Tool],
        *,
        reasoning: ReasoningFamily | None = None,
        opened: bool = False,
        options: ReasoningOptions | None = None,
        must_call: bool = False,
        make_id: MakeId | None = None,
    ) -> None:
        """Prepare.

        Args:
            family: the format of calls; None: there are none.
            tools: that may be called.
            reasoning: None: text in front of the answer is the answer.
            opened: the answer begins inside the reasoning.
            options: what the request says about reasoning.
            must_call: the answer is calls, so that a cut beginning of one is no content.
            make_id: of calls; None: as the family has them.
        """
        rule = IdRule.OPENAI if family is None else family.id_rule
        self._family = family
        self._reasoning = reasoning
        self._opened = opened
        self._must_call = must_call
        self._source = Source()
        self._emitter = Emitter(
            {tool.name: tool for tool in tools} if family is not None else {},
            options or ReasoningOptions(),
            make_id or _ID_RULES[rule],
        )
        self._ended = False
        self._marker_size = 0
        self._is_reasoning = False
        self._answer_ends: tuple[str, ...] = ()
        self._machine = self._run()

    def feed(self, text: str, final: bool = False) -> list[Delta]:
        """The deltas that are certain with this text; `final`: it is the last."""
        if self._ended:
            return []
        self._source.push(text, final)
        next(self._machine, None)
        if final:
            self._ended = True
            self._emitter.end()
        return self._emitter.take()

    def _run(self) -> Waits:
        source, emitter, family = self._source, self._emitter, self._family
        if (family is not None and family.form is Form.HARMONY) or (
            self._reasoning is not None and self._reasoning.name == "harmony"
        ):
            yield from read_harmony(source, emitter)
            yield from self._read_rest()
            return
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
            yield from self._read_answer_mark(self._reasoning)
        if family is None or not emitter.tools:
            yield from self._read_rest()
        elif family.form is Form.GENERIC:
            try:
                yield from read_generic(source, emitter)
            except Trouble:
                self._reread()
            source.mark = None
            yield from self._read_rest()
        else:
            yield from self._read_answer(family)

    def _read_rest(self) -> Waits:
        ends = Markers(self._answer_ends)
        while True:
            text, end = self._source.before(ends)
            if text:
                self._emitter.content(text)
            if end:
                self._emitter.drop_space()
            elif self._source.final:
                return
            else:
                yield

    def _read_reasoning(self, reasoning: ReasoningFamily) -> Waits:
        source, emitter = self._source, self._emitter
        if not self._opened:
            if not (yield from self._skips(reasoning.begin)):
                return
        else:
            yield from self._skips(reasoning.begin)  # models repeat the marker with which the prompt ends
        emitter.begin_reasoning(reasoning.begin)
        self._is_reasoning = True
        family = self._family if emitter.tools else None
        ends = Markers([reasoning.end, *(family.reasoning_ends if family is not None else ())])
        while True:
            text, end = source.before(ends)
            emitter.reasoning(text)
            if end == reasoning.end:
                emitter.end_reasoning(end)
            elif end and family is not None:
                source.mark = source.pos - len(end)
                yield from self._try_calls(family, end)
            if end == reasoning.end or emitter.num_calls:
                break
            if source.at_end:
                return
            if not end:
                yield
        self._is_reasoning = False
        if emitter.num_calls:
            self._answer_ends = (reasoning.end,)

    def _skips(self, marker: str) -> Generator[None, None, bool]:
        """Skip a marker with the whitespace in front of it, if it comes next; whether it did."""
        source = self._source
        source.mark = source.pos
        yield from source.skip_space()
        found = yield from source.literal(marker)
        if not found:
            source.pos = source.mark
        source.mark = None
        return found

    def _read_answer_mark(self, reasoning: ReasoningFamily) -> Waits:
        """Read the mark in front of the answer, if the family has one; without it, the one at the end is content."""
        *begin, end = reasoning.answer_marks or ("",)
        if end and (not begin or (yield from self._skips(begin[0]))):
            self._answer_ends += (end,)
            self._emitter.holds_space = True
            self._emitter.drop_space()

    def _read_answer(self, family: ToolFamily) -> Waits:
        """Content, in which markers begin calls."""
        source, emitter = self._source, self._emitter
        if family.at_start:
            source.mark = source.pos
            yield from source.skip_space()
            yield from self._try_calls(family, "")
        markers = Markers([*family.call_markers, *self._answer_ends])
        dropped = ANYTHING if self._must_call else NAMED_SIGN
        while True:
            text, marker = source.before(markers, dropped=dropped)
            if text:
                emitter.content(text)
            if marker in self._answer_ends:
                emitter.drop_space()
            elif marker:
                source.mark = source.pos - len(marker)
                yield from self._try_calls(family, marker)
            elif source.final:
                return
            else:
                yield

    def _try_calls(self, family: ToolFamily, marker: str) -> Waits:
        """Read calls from the mark on; what are none is content."""
        self._marker_size = len(marker)
        try:
            yield from self._read_calls(family, marker)
        except Trouble:
            self._reread()
        self._source.mark = None

    def _reread(self) -> None:
        """After trouble: the marker at the mark is content, or reasoning; the text after it is read again.

        That is so unless a call has begun, or the answer is cut in the beginning of one. A call that has begun ends,
        unless the answer is cut inside it.
        """
        source = self._source
        if source.mark is None:
            if self._emitter.is_call_open and not source.at_end:
                self._emitter.end_call()
            return
        if source.at_end and (self._marker_size or self._begins_call(source.text[source.mark :])):
            source.mark = None
            self._emitter.drop_space()
            return
        source.pos = source.mark + self._marker_size
        put = self._emitter.reasoning if self._is_reasoning else self._emitter.content
        put(source.text[source.mark : source.pos])
        source.mark = None

    def _begins_call(self, text: str) -> bool:
        """Whether a text without a marker is certainly, or where calls are rare probably, the beginning of a call."""
        if self._must_call or self._emitter.num_calls:
            return True
        squeezed = "".join(text.split())
        heads = ("[{}(", '{{"name":"{}"', '{{"type":"function","name":"{}"')
        return any(head.format(name).startswith(squeezed) for head in heads for name in self._emitter.tools)

    def _read_calls(self, family: ToolFamily, marker: str) -> Waits:
        """Read one call, or the calls of a section, after the marker at their beginning; "": nothing is read yet."""
        source = self._source
        if family.alternative is not None and marker:
            yield from source.skip_space()
            if (yield from source.peek()) not in "[{":
                family = family.alternative
        if not (yield from source.pieces(family.after(marker))):
            raise Trouble
        while True:
            yield from source.skip_space()
            yield from _READERS[family.form](source, self._emitter, family)
            for piece in family.call_end:
                yield from source.pieces((piece,))
            if not family.section_begin and not family.at_start:
                return
            if not (yield from self._finds_call(family)):
                return

    def _finds_call(self, family: ToolFamily) -> Generator[None, None, bool]:
        """Whether another call may follow in the section; at its end, the end is read. Other text is content."""
        source = self._source
        source.mark, self._marker_size = source.pos, 0
        yield from source.skip_space()
        separator = "".join(family.separator).strip()
        found = bool(separator) and (yield from source.literal(separator))
        if family.section_end and (yield from source.pieces(family.section_end[:1])):
            source.mark = None
            for piece in family.section_end[1:]:
                yield from source.pieces((piece,))
            return False
        if family.call_begin:
            found = yield from source.pieces(family.call_begin)
        else:
            yield from source.skip_space()
            if family.form is Form.JSON and not found:  # models also write a newline between calls
                found = (yield from source.peek()) == "{"
        if source.at_end:  # what has begun is no text for the client
            source.mark = None
            return False
        if not found:
            source.pos, source.mark = source.mark, None
        return found


def _nine_letters(name: str, call: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _indexed(name: str, call: int) -> str:
    return f"functions.{name}:{call}"


_ID_RULES: Final[dict[IdRule, MakeId]] = {
    IdRule.OPENAI: random_id,
    IdRule.NINE: _nine_letters,
    IdRule.INDEXED: _indexed,
}
