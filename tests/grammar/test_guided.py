"""`GuidedMatcher` with the fake backend: reasoning blocks, triggers, budgets, and any split into tokens."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.backend import MatcherErrorCode
from engine.grammar.guided import GuidedMatcher, Phase
from engine.grammar.markers import allows
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, ReasoningBlock, Triggered

from .fake_backend import FakeBackend, ListVocabulary

SINGLES = [bytes([byte]) for byte in (string.printable.encode())]
MERGED = [
    b"<think>",
    b"</think>",
    b"<th",
    b"ink>",
    b"nk>y",
    b"k>\n",
    b"</think>x",
    b"ye",
    b"yes",
    b"<call>",
    b"call>a",
]
EOS = len(SINGLES) + len(MERGED)
SPECIAL_END = EOS + 1
VOCABULARY = ListVocabulary(
    [*SINGLES, *MERGED, b"<eos>", b"</s>"], eos_token_ids=(EOS,), special_token_ids=(SPECIAL_END,)
)
ID = {token: token_id for token_id, token in reversed(list(enumerate(VOCABULARY.tokens)))}
WORDS = -(-VOCABULARY.size // 32)
YES_NO = GrammarSpec(GrammarKind.REGEX, "yes|no")
OPENED = ReasoningBlock(b"<think>", b"</think>", opened=True)
MAYBE = ReasoningBlock(b"<think>", b"</think>", opened=False)
CALL = Triggered(b"<call>", GrammarSpec(GrammarKind.REGEX, "a()|b()"))


def make(use: GrammarUse, **failures: int) -> GuidedMatcher:
    backend = FakeBackend(VOCABULARY, **failures)  # type: ignore[arg-type]
    return GuidedMatcher(use, tuple(map(backend.compile, use.specs)), VOCABULARY)


def allowed(matcher: GuidedMatcher) -> set[bytes]:
    """By its mask, with which `allows` must agree."""
    mask = np.zeros(WORDS, np.int32)
    matcher.copy().fill(mask)
    for token_id in range(VOCABULARY.size):
        assert matcher.copy().allows(token_id) == allows(mask, token_id), VOCABULARY.tokens[token_id]
    matcher.fill(mask)
    return {token for token_id, token in enumerate(VOCABULARY.tokens) if allows(mask, token_id)}


def phase(matcher: GuidedMatcher) -> Phase:
    return matcher.phase


def wants_mask(matcher: GuidedMatcher) -> bool:
    return matcher.wants_mask


def feed(matcher: GuidedMatcher, *tokens: bytes) -> int:
    return matcher.accept([ID[token] for token in tokens])


def feed_text(matcher: GuidedMatcher, text: bytes) -> int:
    return feed(matcher, *(bytes([byte]) for byte in text))


def test_without_reasoning_the_grammar_begins_at_once():
    matcher = make(GrammarUse(spec=YES_NO))

    assert wants_mask(matcher)
    assert allowed(matcher) == {b"y", b"ye", b"yes", b"n"}
    assert feed(matcher, b"ye", b"s", b"x") == 2
    assert matcher.ended
    assert matcher.error == ""


def test_an_open_block_comes_before_the_grammar():
    matcher = make(GrammarUse(spec=YES_NO, reasoning=OPENED))

    assert feed_text(matcher, b"hmm, no, </thin") == 15
    assert phase(matcher) is Phase.BLOCK
    assert feed(matcher, b"k", b">") == 2

    assert allowed(matcher) == {b"y", b"ye", b"yes", b"n"}
    assert feed(matcher, b"n", b"o") == 2
    assert matcher.ended


def test_masks_of_a_block_exclude_eos_and_tokens_with_text_after_the_marker():
    matcher = make(GrammarUse(spec=YES_NO, reasoning=OPENED))

    assert set(VOCABULARY.tokens) - allowed(matcher) == {b"<eos>", b"</think>x"}
    feed_text(matcher, b"</thi")
    assert set(VOCABULARY.tokens) - allowed(matcher) == {b"<eos>", b"</think>x", b"nk>y"}
    feed_text(matcher, b"n")
    assert set(VOCABULARY.tokens) - allowed(matcher) == {b"<eos>", b"</think>x", b"k>\n"}
    assert b"ink>" in allowed(matcher)


def test_eos_in_a_block_is_refused_with_a_grammar_and_ends_free_text():
    guided, free = make(GrammarUse(spec=YES_NO, reasoning=OPENED)), make(GrammarUse(reasoning=OPENED))

    assert guided.validate([EOS]) == 0
    assert guided.accept([EOS]) == 0
    assert guided.error_code is MatcherErrorCode.BUG
    assert not wants_mask(free)
    assert free.accept([EOS]) == 1
    assert free.ended


def test_text_after_the_marker_in_its_token_is_read_by_the_grammar():
    good, bad = (
        make(GrammarUse(spec=YES_NO, reasoning=OPENED)),
        make(GrammarUse(spec=YES_NO, reasoning=OPENED)),
    )

    assert feed(good, *[bytes([b]) for b in b"</thi"], b"nk>y", b"e", b"s") == 8
    assert good.ended
    assert feed(bad, b"</think>x") == 0
    assert "after the reasoning block" in bad.error


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_after_the_budget_only_the_end_marker_is_allowed(budget):
    use = GrammarUse(
        spec=YES_NO, reasoning=ReasoningBlock(b"<think>", b"</think>", opened=True, budget=budget)
    )
    matcher = make(use)

    assert feed_text(matcher, b"z" * budget) == budget

    assert matcher.forced() == [ID[b"</think>"]]
    assert allowed(matcher) == {b"</think>"}
    assert matcher.validate([ID[b"z"]]) == 0
    assert feed(matcher, b"</think>", b"yes") == 2
    assert matcher.ended


def test_a_marker_of_several_tokens_that_has_begun_is_completed_at_the_budget():
    reasoning = ReasoningBlock(b"<think>", b"</end>", opened=True, budget=3)
    matcher = make(GrammarUse(reasoning=reasoning))

    assert not wants_mask(matcher)
    feed_text(matcher, b"z</")
    assert wants_mask(matcher)

    assert VOCABULARY.text(matcher.forced()) == b"end>"
    for byte in b"end>":
        assert allowed(matcher) == {bytes([byte])}
        assert feed_text(matcher, bytes([byte])) == 1
    assert phase(matcher) is Phase.FREE
    assert not wants_mask(matcher)


def test_a_special_token_is_a_marker():
    matcher = make(GrammarUse(spec=YES_NO, reasoning=ReasoningBlock(b"<s>", b"</s>", opened=True, budget=1)))

    feed_text(matcher, b"z")

    assert matcher.forced() == [SPECIAL_END]
    assert matcher.accept([SPECIAL_END]) == 1
    assert phase(matcher) is Phase.GRAMMAR


def test_a_budget_is_not_enforced_if_no_tokens_spell_the_marker():
    matcher = make(GrammarUse(reasoning=ReasoningBlock(b"<t>", b"</\x00>", opened=True, budget=1)))

    assert feed_text(matcher, b"zzz") == 3
    assert not wants_mask(matcher)


def test_whitespace_before_the_opening_marker_is_text_of_neither():
    matcher = make(GrammarUse(triggered=(CALL,), reasoning=MAYBE))

    assert feed(matcher, b" ", b"\n", b"<think>") == 3
    assert phase(matcher) is Phase.BLOCK


def test_text_that_does_not_become_the_marker_may_be_a_trigger():
    matcher = make(GrammarUse(triggered=(CALL,), reasoning=MAYBE))

    assert feed(matcher, b"<", b"call>a", b"(") == 3
    assert phase(matcher) is Phase.TRIGGERED


def test_an_answer_may_begin_with_a_block_or_with_the_grammar():
    use = GrammarUse(spec=YES_NO, reasoning=MAYBE)

    assert allowed(make(use)) == {b"y", b"ye", b"yes", b"n", b"<", b"<th", b"<think>"}
    matcher = make(use)
    assert feed(matcher, b"<th") == 1
    assert allowed(matcher) == {b"i", b"ink>"}
    assert feed(matcher, b"ink>", b"?", b"</think>") == 3
    assert allowed(matcher) == {b"y", b"ye", b"yes", b"n"}
    matcher = make(use)
    assert feed(matcher, b"no"[:1], b"o") == 2
    assert matcher.ended


def test_a_grammar_and_a_marker_with_the_same_beginning():
    use = GrammarUse(spec=GrammarSpec(GrammarKind.REGEX, "<this>|no"), reasoning=MAYBE)
    block, answer = make(use), make(use)

    assert feed(block, b"<th") == feed(answer, b"<th") == 1
    assert allowed(block) == {b"i", b"ink>"}
    assert feed(block, b"i", b"n", b"k>\n") == 3
    assert phase(block) is Phase.BLOCK
    assert feed(answer, b"i", b"s", b">") == 3
    assert answer.ended


def test_free_text_has_no_mask_until_a_trigger():
    matcher = make(GrammarUse(triggered=(CALL,)))

    assert not wants_mask(matcher)
    assert feed(matcher, b"H", b"i", b" ", b"<", b"call>a") == 5
    assert phase(matcher) is Phase.TRIGGERED
    assert allowed(matcher) == {b"("}
    assert feed(matcher, b"(", b")") == 2
    assert phase(matcher) is Phase.FREE
    assert not matcher.ended
    assert feed(matcher, b"<call>", b"b", b"(", b")", b"!", b"<eos>") == 6
    assert matcher.ended


def test_a_grammar_that_refuses_the_rest_of_the_trigger_s_token_is_dropped():
    other = Triggered(b"<call>", GrammarSpec(GrammarKind.REGEX, "b()"))
    matcher = make(GrammarUse(triggered=(other,)))

    assert feed(matcher, b"<", b"call>a", b"<call>") == 3

    assert matcher.error == ""
    assert phase(matcher) is Phase.TRIGGERED


def test_the_answer_ends_after_the_first_triggered_grammar():
    matcher = make(GrammarUse(triggered=(CALL,), ends_after_first=True))

    assert feed(matcher, b"<call>", b"a", b"(", b")", b"x") == 4
    assert matcher.ended


def test_triggers_inside_the_block_are_text():
    matcher = make(GrammarUse(triggered=(CALL,), reasoning=OPENED))

    feed(matcher, b"<call>", b"z", b"</think>", b"<call>")

    assert matcher.error == ""
    assert phase(matcher) is Phase.TRIGGERED


def test_drafts_are_masked_after_a_block_that_ends_among_them():
    matcher = make(GrammarUse(spec=YES_NO, reasoning=OPENED))
    drafts = [ID[token] for token in (b"z", b"</think>", b"ye")]
    masks = np.zeros((4, WORDS), np.int32)

    assert matcher.validate([*drafts, ID[b"z"]]) == 3
    matcher.fill_drafts(drafts, masks)

    ids = [{i for i in range(VOCABULARY.size) if allows(row, i)} for row in masks]
    assert EOS not in ids[0] | ids[1]
    assert len(ids[1]) > 90
    assert ids[2] == {ID[token] for token in (b"y", b"ye", b"yes", b"n")}
    assert ids[3] == {ID[b"s"]}
    assert phase(matcher) is Phase.BLOCK


@pytest.mark.parametrize(
    ("failure", "code"), [("limit_after", MatcherErrorCode.LIMIT), ("dead_end_after", MatcherErrorCode.BUG)]
)
def test_an_error_of_the_grammar_is_the_matcher_s(failure, code):
    matcher = make(GrammarUse(spec=YES_NO), **{failure: 1})

    feed(matcher, b"y")
    mask = np.zeros(WORDS, np.int32)
    matcher.fill(mask)

    assert matcher.error_code is code
    assert (mask == -1).all()


def test_a_copy_is_independent():
    matcher = make(GrammarUse(spec=YES_NO, reasoning=OPENED))
    feed(matcher, b"</think>")
    twin = matcher.copy()

    feed(matcher, b"yes")

    assert matcher.ended
    assert not twin.ended
    assert feed(twin, b"n", b"o") == 2
    assert twin.ended


IN_BLOCK = ReasoningBlock(b"<think>", b"</think>", opened=True, calls=(b"<call>",))
LONG_CALL = Triggered(b"<call>", GrammarSpec(GrammarKind.REGEX, "get_weather()|get_time()"))


@pytest.mark.parametrize("marker", [b"<call>", b"call>"])
def test_a_call_inside_of_open_reasoning_ends_the_block(marker):
    matcher = make(GrammarUse(triggered=(LONG_CALL,), reasoning=IN_BLOCK))

    feed_text(matcher, b"I try <call>get_no")  # a mention
    assert phase(matcher) is Phase.BLOCK and not wants_mask(matcher)
    feed_text(matcher, b"w or " + b"<call>"[: -len(marker)])
    if marker == b"<call>":
        feed(matcher, marker)
    else:
        feed_text(matcher, marker)
    feed_text(matcher, b"get_wea")
    twin, other = matcher.copy(), matcher.copy()
    feed_text(matcher, b"t")
    assert phase(matcher) is Phase.TRIGGERED and phase(twin) is Phase.BLOCK
    feed_text(other, b"t")
    assert phase(other) is Phase.TRIGGERED and allowed(other) == {b"h"}
    assert allowed(matcher) == {b"h"}
    feed_text(matcher, b"her()</think>")
    assert phase(matcher) is Phase.FREE
    feed_text(twin, b"</think>")
    assert phase(twin) is Phase.FREE


def test_a_marker_that_begins_in_the_text_of_a_refused_call_is_found():
    call = Triggered(b"<call>", GrammarSpec(GrammarKind.REGEX, "<get_weather>"))
    matcher = make(GrammarUse(triggered=(call,), reasoning=IN_BLOCK))

    feed_text(matcher, b"I try <call><call><get_we")
    assert phase(matcher) is Phase.BLOCK
    feed_text(matcher, b"a")
    assert phase(matcher) is Phase.TRIGGERED and allowed(matcher) == {b"t"}


def test_a_call_that_is_demanded_is_found_in_open_reasoning():
    spec = GrammarSpec(GrammarKind.REGEX, "<call>get_weather()|<call>get_time()")
    matcher = make(GrammarUse(spec=spec, reasoning=IN_BLOCK))

    feed_text(matcher, b"<call> or <call>get_weat")
    assert phase(matcher) is Phase.GRAMMAR and allowed(matcher) == {b"h"}
    feed_text(matcher, b"her()")
    assert matcher.ended and not matcher.error


def split(text: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


PIECES = ["<think>", "</think>", "<call>", "a()", "b()", "yes", "no", " ", "<", "</th", "z", "\n"]
USES = [
    GrammarUse(spec=YES_NO, reasoning=OPENED),
    GrammarUse(spec=YES_NO, reasoning=MAYBE),
    GrammarUse(spec=GrammarSpec(GrammarKind.REGEX, "<think|<thinks>yes"), reasoning=MAYBE),
    GrammarUse(triggered=(CALL,)),
    GrammarUse(triggered=(CALL, Triggered(b"</th", YES_NO)), reasoning=MAYBE),
    GrammarUse(triggered=(CALL,), reasoning=OPENED, ends_after_first=True),
    GrammarUse(triggered=(CALL,), reasoning=IN_BLOCK, ends_after_first=True),
]


@given(
    use=st.sampled_from(USES),
    text=st.lists(st.sampled_from(PIECES), max_size=8).map(lambda pieces: "".join(pieces).encode()),
    cuts=st.lists(st.integers(0, 40)),
)
def test_the_same_bytes_lead_to_the_same_state_in_any_split(use, text, cuts):
    """The texts are accepted byte by byte. In other splits a token may go beyond the end of the answer."""
    pieces = split(text, cuts)
    vocabulary = ListVocabulary([*SINGLES, *(piece for piece in pieces if len(piece) > 1)])
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    backend = FakeBackend(vocabulary)
    compiled = tuple(map(backend.compile, use.specs))
    bytewise, other = GuidedMatcher(use, compiled, vocabulary), GuidedMatcher(use, compiled, vocabulary)

    count = bytewise.accept([ids[bytes([byte])] for byte in text])
    if bytewise.error or bytewise.ended:
        return
    assert count == len(text)
    assert other.accept([ids[piece] for piece in pieces if piece]) == len(
        [piece for piece in pieces if piece]
    )

    masks = np.zeros((2, -(-vocabulary.size // 32)), np.int32)
    bytewise.fill(masks[0])
    other.fill(masks[1])
    assert (bytewise.phase, bytewise.ended, bytewise.error) == (other.phase, other.ended, other.error)
    assert (masks[0] == masks[1]).all()
