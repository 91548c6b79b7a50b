"""`OutputBuilder`: an answer of `LLM`, of its rows."""

from __future__ import annotations

import struct

from engine.grammar.answer_report import GrammarReport, OverruledToken, Truncated
from engine.offline.outputs import OutputBuilder
from engine.runtime.grammar_use import GrammarUse
from engine.runtime.messages import Finish, FinishKind, GrammarUsage, Overruled, TextOutput, Usage
from tests.grammar.test_answer_report import CUT, JSON, TOKENIZER

TEXT = '{"a": [1, 23]}'
PUSHED = GrammarUsage(0.0015, 0.00025, 6, 2, Overruled(10, ord("x"), ord("2")), cut_at=11)


def built(grammar: GrammarUse | None, usage: GrammarUsage | None, finish: Finish) -> OutputBuilder:
    """An answer that came in two rows; the figures are in the last one."""
    builder = OutputBuilder("r", [1, 2], 0, TOKENIZER, grammar=grammar)
    for begin, end in ((0, 9), (9, len(TEXT))):
        token_ids = struct.pack(f"<{end - begin}i", *map(ord, TEXT[begin:end]))
        is_last = end == len(TEXT)
        used = Usage(2, end, grammar=usage if is_last else None)
        builder.add(TextOutput("r", TEXT[begin:end], token_ids, used, finish if is_last else None), 0)
    return builder


def test_an_answer_with_a_grammar_says_how_hard_it_pushed_and_where_the_answer_was_cut():
    output = built(JSON, PUSHED, CUT).build()

    assert output.grammar == GrammarReport(1.5, 250, 6, 2, OverruledToken("/a/1", "x", "2"))
    assert output.truncated == Truncated("/a/1", 3)
    assert "truncated=Truncated(at='/a/1', forced_tokens=3, complete=True)" in repr(output)


def test_free_text_has_neither():
    output = built(None, None, Finish(FinishKind.LENGTH)).build()

    assert (output.text, output.grammar, output.truncated) == (TEXT, None, None)
    assert "truncated" not in repr(output)
