"""`EndReasoning`: the open block of a running request ends with the next token that is not being computed yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.grammar.backend import Matcher
from engine.grammar.guided import GuidedMatcher, Phase
from engine.runtime.grammar_use import GrammarUse, ReasoningBlock
from engine.runtime.messages import Call, EndReasoning, FinishKind, PauseMode, ReasoningDone
from engine.scheduler.journal.log_file import Input, read_runs
from engine.scheduler.journal.replay import replay
from tests.grammar.fake_backend import ListVocabulary
from tests.scheduler.grammar.toy_matcher import VOCAB_SIZE
from tests.scheduler.harness import Harness
from tests.scheduler.journal.recorded import finish, record

CHARS = [bytes([code]) for code in range(31, 31 + VOCAB_SIZE)]
VOCABULARY = ListVocabulary(CHARS)
END = [VOCABULARY.tokens.index(bytes([byte])) for byte in b"</t>"]
BLOCK = ReasoningBlock(b"<t>", b"</t>", opened=True)


class Guided(Harness):
    """Requests with a reasoning block, and no other grammar."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.matcher_of: dict[str, GuidedMatcher] = {}
        self.use = GrammarUse(reasoning=BLOCK, compiles=True)
        self.matchers.take = self.take  # type: ignore[method-assign]
        self.runner.check_masks = lambda *_: None  # type: ignore[method-assign]
        self.runner.check_late_masks = lambda *_: None  # type: ignore[method-assign]

    def take(self, rid: str) -> Matcher:
        self.matcher_of[rid] = matcher = GuidedMatcher(self.use, (), VOCABULARY)
        return matcher

    def check_answers(self) -> None:
        assert all(answer.finish is not None for answer in self.answers.values())

    def end_reasoning(self, rid: str) -> bool:
        self.scheduler.handle(Call(3000, EndReasoning(rid)), self.now_s)
        [done] = self.scheduler.take_call_answers()
        assert isinstance(done.answer, ReasoningDone)
        return done.answer.done

    def reason(self, *, delivered: Sequence[int] = (), ends: bool = False, **sampling: Any) -> str:
        use = GrammarUse(reasoning=ReasoningBlock(b"<t>", b"</t>", True, None, (), ends), compiles=True)
        sampling.setdefault("max_new_tokens", 24)
        return self.submit(delivered=delivered, message={"grammar": use}, **sampling)


def end_in(tokens: Sequence[int]) -> int:
    """Where the marker begins; -1: nowhere."""
    return next((n for n in range(len(tokens)) if list(tokens[n : n + len(END)]) == END), -1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("settings", [{}, {"overlap": 1}, {"speculative": "ngram"}], ids=str)
def test_the_block_ends_after_the_tokens_in_flight(settings: dict[str, Any], late: bool):
    harness = Guided(**settings)
    harness.runner.late = late
    first, other = harness.reason(), harness.reason(prompt_len=11)
    for _ in range(6):
        harness.step()
    assert harness.end_reasoning(first)
    settled = len(harness.answers[first].tokens)
    harness.run_until_idle()

    answer = harness.answers[first]
    assert answer.finish is not None and answer.finish.kind is FinishKind.LENGTH, answer.finish
    assert settled <= end_in(answer.tokens) <= settled + len(settings)
    assert len(answer.tokens) == 24 and harness.matcher_of[first].phase is Phase.FREE
    assert end_in(harness.answers[other].tokens) == -1
    assert harness.scheduler.report(harness.now_s).totals.generation_tokens == 48


def test_before_the_first_token_the_block_is_empty():
    harness = Guided()
    rid = harness.reason()
    assert harness.end_reasoning(rid)
    harness.run_until_idle()
    assert end_in(harness.answers[rid].tokens) == 0


def test_a_retracted_request_ends_its_block_when_it_goes_on():
    harness = Guided()
    rid = harness.reason()
    for _ in range(5):
        harness.step()
    harness.pause(PauseMode.RETRACT)
    num_tokens = len(harness.answers[rid].tokens)
    assert harness.end_reasoning(rid)
    harness.resume()
    harness.run_until_idle()
    assert 0 < num_tokens == end_in(harness.answers[rid].tokens)


def test_a_request_that_is_submitted_again_ends_its_block_after_what_was_delivered():
    harness = Guided()
    rid = harness.reason(delivered=[40, 41, 42], ends=True)
    harness.run_until_idle()
    answer = harness.answers[rid]
    assert (answer.tokens[:3], end_in(answer.tokens)) == ([40, 41, 42], 3)


def test_what_has_no_open_block_says_so():
    harness = Guided()
    free = harness.submit(max_new_tokens=8)
    rid = harness.reason()
    harness.step()
    assert not harness.end_reasoning(free)
    assert not harness.end_reasoning("unknown")
    assert harness.end_reasoning(rid)
    for _ in range(6):
        harness.step()
    assert end_in(harness.answers[rid].tokens) >= 0
    assert not harness.end_reasoning(rid), "it has ended"
    harness.run_until_idle()
    assert not harness.end_reasoning(rid)


@pytest.mark.parametrize("overlap", [0, 1])
def test_it_is_a_logged_input_that_is_replayed(tmp_path: Path, overlap: int):
    path = tmp_path / "decisions.log"
    harness = record(path, kind=Guided, overlap=overlap)
    assert isinstance(harness, Guided)
    rid = harness.reason()
    for _ in range(4):
        harness.step()
    assert harness.end_reasoning(rid)
    harness.run_until_idle()
    finish(harness)
    assert end_in(harness.answers[rid].tokens) > 0
    [records] = [list(run.records) for run in read_runs(path)]
    calls = [each.message for each in records if isinstance(each, Input) and isinstance(each.message, Call)]
    assert [each.request for each in calls] == [EndReasoning(rid)]
    [replayed] = [replay(run) for run in read_runs(path)]
    assert replayed.is_equal and replayed.num_steps > 10
