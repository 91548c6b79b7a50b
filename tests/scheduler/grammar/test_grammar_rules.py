"""When a grammar ends a request, and what wins over what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.grammar.backend import MatcherErrorCode
from engine.runtime.messages import Finish, FinishKind, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.grammar.grammar_rules import MATCHED_GRAMMAR, GrammarDrafts, advance, may_go_on, resume
from engine.scheduler.records.decision_log import MatcherDrafts
from engine.scheduler.requests.req import Req
from engine.scheduler.requests.row_states import RowStates
from tests.scheduler.fake_runner import expected_output
from tests.scheduler.grammar.toy_matcher import VOCAB_SIZE, ToyGrammar, ToyMatcher
from tests.scheduler.harness import Harness

PROMPT = [3, 1, 4, 1, 5]
STOP, LENGTH = Finish(FinishKind.STOP, matched=5), Finish(FinishKind.LENGTH)


def req_of(grammar: ToyGrammar, tokens: list[int] | None = None) -> Req:
    params = SamplingParams(max_new_tokens=50, seed=1)
    ids = np.array(PROMPT, dtype=np.int32).tobytes()
    req = Req(GenerateRequest("a", ids, params, grammar=grammar.use), 1, 0.0)
    req.matcher = ToyMatcher(grammar, tokens or [])
    req.output_len = req.num_matched = len(tokens or [])
    return req


def next_of(grammar: ToyGrammar, count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(min(grammar.allowed(tokens)))
    return tokens


def take(req: Req, token: int, finish: Finish | None = None) -> Finish | None:
    req.output_len += 1
    return advance(req, token, finish)


def test_it_ends_with_its_last_token():
    grammar = ToyGrammar(length=3)
    req, tokens = req_of(grammar), next_of(grammar, 3)
    assert take(req, tokens[0]) is None and take(req, tokens[1]) is None
    assert take(req, tokens[2]) == Finish(FinishKind.STOP, matched=MATCHED_GRAMMAR)


def test_a_limit_below_the_shortest_answer_is_an_error_of_the_request():
    req = req_of(ToyGrammar(length=3))

    class Refusing(ToyMatcher):
        error_code = MatcherErrorCode.TOO_SHORT

    req.matcher = matcher = Refusing(ToyGrammar(length=3))
    matcher.error = "the shortest answer has 3 tokens"
    assert resume(req) == Finish(
        FinishKind.ERROR,
        message="the shortest answer has 3 tokens",
        status=400,
        code="max_tokens_too_small",
    )


@pytest.mark.parametrize(
    ("finish", "expected"), [(STOP, 5), (LENGTH, MATCHED_GRAMMAR), (None, MATCHED_GRAMMAR)]
)
def test_a_stop_token_wins_over_the_grammar_which_wins_over_the_length(finish, expected):
    grammar = ToyGrammar(length=2)
    tokens = next_of(grammar, 2)
    end = take(req_of(grammar, tokens[:1]), tokens[1], finish)
    assert end is not None and end.kind is FinishKind.STOP and end.matched == expected


@pytest.mark.parametrize("finish", [STOP, LENGTH, None])
def test_a_cut_answer_ends_by_its_length(finish):
    grammar = ToyGrammar(length=2)
    tokens = next_of(grammar, 2)
    req = req_of(grammar, tokens[:1])
    assert isinstance(req.matcher, ToyMatcher)
    req.matcher.is_cut = True
    assert take(req, tokens[1], finish) == Finish(FinishKind.LENGTH, matched=MATCHED_GRAMMAR)


@pytest.mark.parametrize("finish", [STOP, LENGTH, None])
@pytest.mark.parametrize("fault", ["dead", "refuse"])
def test_an_error_wins_over_all(finish, fault):
    grammar = ToyGrammar(fault=fault, fault_at=0)
    end = take(req_of(grammar), 50, finish)
    assert end is not None and (end.kind, end.status) == (FinishKind.ERROR, 500)
    assert "the grammar cannot continue after 0 tokens: token 50 " in end.message


def test_length_ends_what_the_grammar_does_not():
    grammar = ToyGrammar(length=9)
    assert take(req_of(grammar), next_of(grammar, 1)[0], LENGTH) is LENGTH


def test_the_tokens_of_inner_steps_are_accepted_once_and_end_the_request_at_their_own_position():
    grammar = ToyGrammar(length=3)
    req, tokens = req_of(grammar), next_of(grammar, 3)
    batch: Any = type("Batch", (), {"reqs": [req]})()
    assert [may_go_on(batch, [token]) for token in tokens] == [True, True, False]
    assert req.num_matched == 3 and isinstance(req.matcher, ToyMatcher)
    assert take(req, tokens[0]) is None and take(req, tokens[1]) is None
    end = take(req, tokens[2])
    assert end is not None and end.matched == MATCHED_GRAMMAR
    assert req.matcher.tokens == tokens and req.matcher.calls.count("accept") == 3


def test_delivered_tokens_are_accepted_first():
    grammar = ToyGrammar(length=4)
    tokens = next_of(grammar, 4)
    for count in range(1, 5):
        req = req_of(grammar)
        req.fill_ids += np.array(tokens[:count], dtype=np.int32).tobytes()
        req.num_delivered = req.output_len = count
        end = resume(req)
        assert (end is None) == (count < 4)
        assert req.num_matched == count and isinstance(req.matcher, ToyMatcher)
        assert req.matcher.tokens == tokens[:count]


def test_a_delivered_token_that_is_refused_ends_that_request():
    harness = Harness()
    grammar = ToyGrammar(length=9)
    wrong = next(token for token in range(VOCAB_SIZE) if token not in grammar.allowed([]))
    harness.submit("a", prompt=PROMPT, grammar=grammar, delivered=[wrong], max_new_tokens=20)
    finish = harness.answers["a"].finish
    assert finish is not None and finish.kind is FinishKind.ERROR and finish.status == 500


# ------------------------------------------------------------ in a scheduler


def answer_of(
    grammar: ToyGrammar, *, eos: tuple[int, ...] = (0,), **sampling: Any
) -> tuple[list[int], Finish]:
    harness = Harness(eos=eos)
    harness.submit("a", prompt=PROMPT, grammar=grammar, **sampling)
    harness.run_until_idle()  # compares the tokens with `expected_output`
    finish = harness.answers["a"].finish
    assert finish is not None
    return harness.answers["a"].tokens, finish


def test_it_ends_where_the_grammar_does():
    tokens, finish = answer_of(ToyGrammar(length=6), max_new_tokens=40)
    assert len(tokens) == 6 and finish == Finish(FinishKind.STOP, matched="grammar")


def test_min_tokens_give_way_to_the_grammar():
    tokens, finish = answer_of(ToyGrammar(length=6), max_new_tokens=40, min_new_tokens=10)
    assert len(tokens) == 6 and finish.matched == "grammar"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_eos_token_of_the_grammar_ends_it_also_with_ignore_eos(ignore_eos):
    eos = tuple(range(0, 97, 2))
    grammar = ToyGrammar(seed=4, eos=eos, ends_early=True)
    tokens, finish = answer_of(grammar, eos=eos, max_new_tokens=80, ignore_eos=ignore_eos)
    assert tokens[-1] in eos and not set(tokens[:-1]) & set(eos) and len(tokens) < 80
    assert finish.kind is FinishKind.STOP and finish.matched == ("grammar" if ignore_eos else tokens[-1])


def test_a_stop_token_ends_it_earlier():
    free = expected_output(
        PROMPT, SamplingParams(max_new_tokens=30), frozenset(), VOCAB_SIZE, None, ToyGrammar(length=20)
    )[0]
    stop = free[4]
    tokens, finish = answer_of(ToyGrammar(length=20), max_new_tokens=30, stop_token_ids=(stop,))
    assert tokens == free[: free.index(stop) + 1] and finish.matched == stop


@pytest.mark.parametrize("fault", ["dead", "refuse"])
def test_a_failing_grammar_is_the_servers_error(fault):
    tokens, finish = answer_of(ToyGrammar(fault=fault, fault_at=4), max_new_tokens=30)
    assert len(tokens) == 5 and (finish.kind, finish.status) == (FinishKind.ERROR, 500)


def test_the_first_token_of_a_cut_answer_is_kept():
    grammar = ToyGrammar(length=9)
    req, tokens = req_of(grammar), next_of(grammar, 4)
    for position, token in enumerate(tokens):
        if position == 2:
            assert isinstance(req.matcher, ToyMatcher)
            req.matcher.is_cut = True
        take(req, token, None)
    assert req.grammar_figures is not None and req.grammar_figures.cut_at == 2
    assert req.usage().grammar == req.grammar_figures.usage(0)


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
