"""`GuidedAnswer`: text and pointers for counts and positions."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from engine.grammar.answer_report import (
    GrammarReport,
    GuidedAnswer,
    OverruledToken,
    Truncated,
    merged,
    pointer_at_end,
)
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, ReasoningBlock
from engine.runtime.messages import Finish, FinishKind, GrammarUsage, Overruled

JSON = GrammarUse(spec=GrammarSpec(GrammarKind.JSON_SCHEMA, "{}"))
CUT = Finish(FinishKind.LENGTH, matched="grammar")


class Letters:
    """A tokenizer with one token per character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens, "markers of reasoning are special tokens"
        return "".join(map(chr, token_ids))


TOKENIZER: Any = Letters()


def answer_of(
    text: str, usage: GrammarUsage | None, use: GrammarUse = JSON, finish: Finish | None = None
) -> GuidedAnswer:
    answer = GuidedAnswer(use)
    for position, char in enumerate(text, start=1):
        last = position == len(text)
        answer.read(struct.pack("<i", ord(char)), usage if last else None, position, finish if last else None)
    return answer


def overruled_at(position: int) -> GrammarUsage:
    first = Overruled(position, ord("x"), ord("1"))
    return GrammarUsage(0.0123, 0.00045, forced_tokens=7, overruled_tokens=2, first_overruled=first)


def test_figures_have_the_units_of_their_names():
    text = '{"age": 12}'
    report = answer_of(text, overruled_at(8)).report(TOKENIZER)
    assert report == GrammarReport(12.3, 450, 7, 2, OverruledToken("/age", "x", "1"))


def test_before_the_grammar_is_ready_there_is_no_report():
    assert answer_of("", None).report(TOKENIZER) is None


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.LARK])
def test_other_grammars_have_no_pointers(kind):
    use = GrammarUse(spec=GrammarSpec(kind, "a"))
    report = answer_of("{1", overruled_at(1), use).report(TOKENIZER)
    assert report is not None and report.first_overruled == OverruledToken(None, "x", "1")


@pytest.mark.parametrize(
    ("text", "opened", "position", "at"),
    [
        ('so {"a": }</t>{"b": 1', True, 20, "/b"),
        ('so {"a": }</t>{"b": 1', True, 5, None),
        ('<t>so</t>{"b": 1', False, 15, "/b"),
        ("<t>so1", False, 5, None),
        ('{"b": 1', False, 6, "/b"),
    ],
)
def test_the_json_begins_after_the_reasoning(text, opened, position, at):
    use = GrammarUse(spec=JSON.spec, reasoning=ReasoningBlock(b"<t>", b"</t>", opened))
    report = answer_of(text, overruled_at(position), use).report(TOKENIZER)
    assert report is not None and report.first_overruled is not None
    assert report.first_overruled.at == at


def test_an_answer_that_was_cut_and_is_complete_says_where():
    text = '{"people": [{"n": 1}, {"n": 2}]}'
    usage = GrammarUsage(cut_at=text.index("2"))
    assert answer_of(text, usage, finish=CUT).truncated(TOKENIZER) == Truncated("/people/1/n", 4)


@pytest.mark.parametrize(
    ("usage", "finish"),
    [
        (GrammarUsage(cut_at=3), None),
        (GrammarUsage(cut_at=3), Finish(FinishKind.LENGTH)),
        (GrammarUsage(cut_at=3), Finish(FinishKind.STOP, matched="grammar")),
        (GrammarUsage(), CUT),
        (None, CUT),
    ],
    ids=["unfinished", "not complete", "its own end", "no cut", "no grammar"],
)
def test_others_are_not_truncated(usage, finish):
    assert answer_of('{"a": 1}', usage, finish=finish).truncated(TOKENIZER) is None


def test_several_answers_have_one_report():
    token = OverruledToken("/a", "x", "1")
    one, other = GrammarReport(1.5, 2, 3, 0, None), GrammarReport(0.0, 10, 20, 30, token)
    assert merged([one, other]) == GrammarReport(1.5, 12, 23, 30, token)
    assert merged([]) is None


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ("", ""),
        ("{", ""),
        ('{"na', ""),
        ('{"name"', ""),
        ('{"name":', "/name"),
        ('{"name": "Ada', "/name"),
        ('{"name": "a, b: {[', "/name"),
        ('{"name": "\\", "', "/name"),
        ('{"name": "Ada"', "/name"),
        ('{"name": "Ada",', ""),
        ('{"name": "Ada", "age": 3', "/age"),
        ('{"people": [', "/people/0"),
        ('{"people": [{"a": 1}, {', "/people/1"),
        ('{"people": [{"a": 1}, {"b": [[], 2, ', "/people/1/b/2"),
        ('{"people": [1, 2]', "/people"),
        ('{"people": [1, 2]}', ""),
        ("[1, [2, 3], ", "/2"),
        ('{"a/b": {"~": ', "/a~1b/~0"),
        ('{"a\\u0062": ', "/ab"),
        ('"text, with: {signs', ""),
    ],
)
def test_the_pointer_of_the_end(text, pointer):
    assert pointer_at_end(text) == pointer


@pytest.mark.parametrize("text", ["}", "]]", ",,", ":::", '{"\\x": ', "{:", "[:", '\\"', "{]}["])
def test_what_is_no_json_has_some_pointer(text):
    assert isinstance(pointer_at_end(text), str)


@pytest.mark.parametrize(
    ("text", "complete", "expected"),
    [
        ('{"b": {"c": "x', True, Truncated("/b/c", 0, complete=False)),
        ('{"b": {"c": "x', False, None),  # the request did not ask for a complete answer
        ('{"b": 1}', True, None),
        ("12", True, None),
    ],
)
def test_an_answer_that_ends_in_the_middle_says_so(text, complete, expected):
    use = GrammarUse(spec=JSON.spec, complete=complete)
    answer = answer_of(text, overruled_at(1), use, Finish(FinishKind.LENGTH))

    assert answer.truncated(TOKENIZER) == expected
