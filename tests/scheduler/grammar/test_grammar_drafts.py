"""GrammarDrafts: forced tokens first, then n-gram drafts that the grammar allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.scheduler.grammar.grammar_drafts import GrammarDrafts
from engine.scheduler.records.decision_log import MatcherDrafts
from engine.scheduler.requests.row_states import RowStates
from tests.scheduler.grammar.toy_matcher import VOCAB_SIZE, ToyGrammar, ToyMatcher

GRAMMAR = ToyGrammar(seed=5, length=12, forced=((0, 4),))


def drafts_of(grammar: ToyGrammar = GRAMMAR, tokens: tuple[int, ...] = ()) -> tuple[GrammarDrafts, Any]:
    req = type("Req", (), {"matcher": ToyMatcher(grammar, tokens), "rid": "a"})()
    return GrammarDrafts(RowStates(4, 16)), req


def text_of(grammar: ToyGrammar, count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(min(grammar.allowed(tokens)))
    return tokens


def wrong_after(tokens: list[int]) -> int:
    return next(token for token in range(VOCAB_SIZE) if token not in GRAMMAR.allowed(tokens))


def test_forced_tokens_are_the_drafts():
    drafts, req = drafts_of()
    forced = text_of(GRAMMAR, 4)
    assert drafts.propose(req, 20) == (forced, 4)
    assert drafts.take_answers() == {"a": MatcherDrafts(forced, 4)}
    assert drafts.take_answers() == {}


@pytest.mark.parametrize("most", range(5))
def test_at_most_as_many_as_fit(most):
    drafts, req = drafts_of()
    assert drafts.propose(req, most) == (text_of(GRAMMAR, most), most)


def test_ngram_drafts_follow_if_they_begin_with_them():
    drafts, req = drafts_of()
    text = text_of(GRAMMAR, 8)
    assert drafts.propose(req, 20, text) == (text, 4)
    assert drafts.propose(req, 20, [*text[:6], wrong_after(text[:6]), 1]) == (text[:6], 4)
    assert drafts.propose(req, 20, text[:3]) == (text[:4], 4), "shorter than what is forced"
    assert drafts.propose(req, 20, [wrong_after([]), *text[1:]]) == (text[:4], 4), "another text"


def test_ngram_drafts_are_cut_where_the_grammar_refuses_them_and_at_its_end():
    grammar = ToyGrammar(seed=5, length=6)
    drafts, req = drafts_of(grammar)
    text = text_of(grammar, 6)
    assert drafts.propose(req, 20, [*text, 1, 2]) == (text, 0)
    wrong = next(token for token in range(VOCAB_SIZE) if token not in grammar.allowed(text[:2]))
    assert drafts.propose(req, 20, [*text[:2], wrong, *text[3:]]) == (text[:2], 0)
    assert drafts.take_answers() == {"a": MatcherDrafts([], 2)}


def test_nothing_is_proposed_or_noted_after_the_end():
    drafts, req = drafts_of(ToyGrammar(length=1), (7,))
    assert drafts.propose(req, 20) == ([], 0)
    assert drafts.take_answers() == {}


def test_which_rows_have_a_grammar():
    states = RowStates(4, 16)
    states.has_grammar[2] = True
    drafts = GrammarDrafts(states)
    assert drafts.concerns(np.array([1, 2], dtype=np.int32))
    assert not drafts.concerns(np.array([0, 1, 3], dtype=np.int32))
