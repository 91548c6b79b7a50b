"""Choices, regular expressions and grammars as specs."""

from __future__ import annotations

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.lowering.simple import choice_spec, grammar_spec, regex_spec
from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.grammar_use import GrammarKind

from ..byte_grammar import ByteGrammar

LIMITS = RequestLimits()


def test_a_choice_matches_its_texts_alone():
    choices = ["yes", 'n"o', "a\nb", "é😀", "//", "%json {}", "yes"]
    grammar = ByteGrammar(choice_spec(choices, "guided_choice"))

    assert all(map(grammar.accepts, choices))
    assert not any(map(grammar.accepts, ["", "ye", "yesno", "yes "]))


@pytest.mark.parametrize(("choices", "at"), [([], "guided_choice"), (["a", ""], "guided_choice[1]")])
def test_choices_without_text_are_refused(choices, at):
    with pytest.raises(GrammarError) as caught:
        choice_spec(choices, "guided_choice")

    assert (caught.value.code, caught.value.at) == ("invalid_grammar", at)


def test_a_regex_matches_the_whole_text():
    grammar = ByteGrammar(regex_spec(r"^(yes|no), because [a-z ]{1,80}\.$", "regex", LIMITS))

    assert grammar.accepts("no, because of me.")
    assert not grammar.accepts("no, because of me. And")


def test_errors_of_a_regex_have_the_path_and_the_position():
    with pytest.raises(GrammarError) as caught:
        regex_spec("a(?=b)", "sampling_params.regex", LIMITS)

    assert caught.value.code == "invalid_regex"
    assert caught.value.message == "sampling_params.regex: look-around is not supported at character 1"


def test_gbnf_and_lark_are_both_taken():
    for text in ('root ::= "a" | "b"', 'start: "a" | B\nB: "b"'):
        spec = grammar_spec(text, "grammar", LIMITS)
        assert spec.kind is GrammarKind.LARK
        assert ByteGrammar(spec).accepts("b")


@pytest.mark.parametrize(
    ("text", "code"),
    [("nothing", "invalid_grammar"), ("", "invalid_grammar"), ("# " + "x" * 3000, "schema_too_complex")],
)
def test_texts_that_are_no_grammar_are_refused(text, code):
    with pytest.raises(GrammarError) as caught:
        grammar_spec(text, "grammar", RequestLimits(max_schema_kb=1))

    assert caught.value.code == code
