"""Requests that go on where a lost scheduler left them, and requests whose tokenizer manager is gone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.messages import (
    AbandonRequests,
    Delivered,
    FinishKind,
    GenerateRequest,
    GrammarReady,
    GrammarUsage,
    Usage,
)
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler import scheduler as scheduler_module
from tests.selection import examples

from .fake_runner import expected_output, ints
from .grammar.toy_matcher import ToyGrammar
from .harness import VOCAB_SIZE, Harness

PROMPT = list(range(1, 20))


def whole_answer(harness, **sampling):
    """What a request for `PROMPT` is answered with if nothing happens."""
    params = SamplingParams(ignore_eos=True, seed=1, **sampling)
    return expected_output(PROMPT, params, harness.eos, VOCAB_SIZE)[0]


def test_the_answer_goes_on_behind_what_was_delivered(make_scheduler):
    harness = make_scheduler()
    tokens = whole_answer(harness, max_new_tokens=10)
    rid = harness.submit(prompt=PROMPT, max_new_tokens=10, delivered=tokens[:6])

    harness.run_until_idle()

    answer = harness.answers[rid]
    assert [ints(row.token_ids) for row in answer.rows] == [[token] for token in tokens[6:]]
    assert answer.finish.kind is FinishKind.LENGTH
    assert ints(answer.rows[0].options.delivered_ids) == tokens[:6]


def test_usage_is_what_it_was(make_scheduler):
    harness = make_scheduler()
    tokens = whole_answer(harness, max_new_tokens=10)
    before = Usage(len(PROMPT), 6, cached_tokens=8, queue_s=1.5, num_retractions=2)
    rid = harness.submit(prompt=PROMPT, max_new_tokens=10, delivered=tokens[:6], usage=before)

    harness.run_until_idle()

    assert harness.answers[rid].rows[-1].usage == Usage(len(PROMPT), 10, 8, 1.5, 2)


def test_min_new_tokens_count_what_was_delivered(make_scheduler):
    """The runner masks stop tokens by the length of the output, of which it must know all."""
    harness = make_scheduler()
    sampling = {"max_new_tokens": 12, "min_new_tokens": 8, "stop_token_ids": tuple(range(VOCAB_SIZE // 2))}
    tokens = whole_answer(harness, **sampling)
    assert len(tokens) > 8
    rid = harness.submit(prompt=PROMPT, delivered=tokens[:5], **sampling)

    harness.run_until_idle()  # which compares the answer

    assert harness.answers[rid].tokens == tokens


def test_it_is_no_longer_subject_to_the_limit_for_the_queue(make_scheduler):
    harness = make_scheduler()
    tokens = whole_answer(harness, max_new_tokens=10)
    old = {"arrival_s": harness.now_s - 50, "queue_timeout_s": 10.0}
    begun = harness.submit(prompt=PROMPT, max_new_tokens=10, delivered=tokens[:1], message=old)
    waiting = harness.submit(prompt=PROMPT, max_new_tokens=10, message=old)

    harness.run_until_idle()

    assert harness.answers[begun].finish.kind is FinishKind.LENGTH
    assert harness.answers[waiting].finish.status == 503


@settings(max_examples=examples(100))
@given(data=st.data())
def test_wherever_the_answer_was_cut_it_is_the_same(data):
    """Also with siblings, retractions, chunks and steps in flight; the harness compares every token."""
    harness = Harness(
        num_pages=data.draw(st.sampled_from([14, 64])),
        chunked_prefill_size=data.draw(st.sampled_from([4, 64])),
        overlap=data.draw(st.integers(0, 1)),
        radix_cache=data.draw(st.booleans()),
    )
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 20))
        tokens = whole_answer(harness, max_new_tokens=length)
        num_delivered = data.draw(st.integers(0, length - 1))
        harness.submit(
            prompt=PROMPT, max_new_tokens=length, delivered=tokens[:num_delivered], message={"group": "g"}
        )
    harness.run_until_idle()


@pytest.mark.parametrize(
    ("output_ids", "reason"),
    [
        (b"", "at least one"),
        (b"\1\0\0", "3 bytes"),
        (np.ones(4, dtype=np.int32).tobytes(), "4 tokens were delivered"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(make_scheduler, output_ids, reason):
    harness = make_scheduler()
    harness.submit("probe")
    harness.run_until_idle()
    prompt = np.array(PROMPT, dtype=np.int32).tobytes()
    sampling = SamplingParams(max_new_tokens=4, seed=1)
    delivered = Delivered(output_ids, Usage(len(PROMPT), 1))

    harness.scheduler.handle(GenerateRequest("bad", prompt, sampling, delivered=delivered), harness.now_s)
    [message] = harness.scheduler.take_outputs()

    assert message.outputs[0].finish.kind is FinishKind.ERROR
    assert reason in message.outputs[0].finish.message


# ---------------------------------------------------------------- a lost tokenizer manager


def test_requests_of_a_lost_tokenizer_manager_are_aborted_and_free_everything(make_scheduler):
    harness = make_scheduler(max_running_requests=1)
    old = {"arrival_s": harness.now_s}
    harness.submit("running", max_new_tokens=50, message=old)
    harness.submit("waiting", message=old)
    harness.step()
    harness.step()
    new = harness.submit("new", message={"arrival_s": harness.now_s + 2})

    harness.scheduler.handle(AbandonRequests(harness.now_s + 1), harness.now_s)
    harness.run_until_idle()

    assert harness.answers["running"].finish.kind is FinishKind.ABORT
    assert harness.answers["waiting"].finish.kind is FinishKind.ABORT
    assert harness.answers[new].finish.kind is FinishKind.LENGTH
    assert harness.pages().held == 0


def test_what_it_had_sent_and_comes_late_is_dropped(make_scheduler):
    harness = make_scheduler()
    harness.scheduler.handle(AbandonRequests(harness.now_s + 1), harness.now_s)

    late = harness.submit("late", message={"arrival_s": harness.now_s})

    assert harness.scheduler.num_unfinished == 0
    assert harness.answers.pop(late).rows == []


# ---------------------------------------------------------------- one request's own trouble


def test_a_request_that_cannot_even_be_looked_at_ends_alone(make_scheduler, monkeypatch):
    harness = make_scheduler()
    good = harness.submit("good")
    harness.step()

    def fail(message, capacity):
        raise RuntimeError("who would have thought of that")

    monkeypatch.setattr(scheduler_module, "reason_to_refuse", fail)
    bad = harness.submit("bad")
    harness.run_until_idle()

    assert harness.answers[good].finish.kind is FinishKind.LENGTH
    assert (harness.answers[bad].finish.kind, harness.answers[bad].finish.status) == (FinishKind.ERROR, 500)


def test_a_static_batch_waits_as_long_for_one(make_scheduler):
    """Such a request is RETRACTED from its arrival on, and never WAITING."""
    harness = make_scheduler(schedule_policy="static", static_batch_size=3, static_batch_wait=0.5)
    answer = whole_answer(harness, max_new_tokens=4)
    arrived_s = harness.now_s
    harness.submit(prompt=PROMPT, delivered=answer[:1], max_new_tokens=4)
    assert harness.step() is None
    assert harness.scheduler.wake_s() == pytest.approx(arrived_s + 0.5)
    harness.run_until_idle()


@pytest.mark.parametrize("num_delivered", [1, 4, 9, 10])
def test_the_grammar_of_one_goes_on_after_the_delivered_tokens(make_scheduler, num_delivered):
    grammar = ToyGrammar(seed=3, length=10, forced=((5, 8),))
    harness = make_scheduler()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    tokens, kind = expected_output(PROMPT, params, harness.eos, VOCAB_SIZE, None, grammar)
    assert (len(tokens), kind) == (10, FinishKind.STOP)
    harness.submit("a", prompt=PROMPT, grammar=grammar, delivered=tokens[:num_delivered], max_new_tokens=20)
    assert (harness.answers["a"].finish is not None) == (num_delivered == 10)
    harness.run_until_idle()  # compares the tokens
    finish = harness.answers["a"].finish
    assert finish is not None and finish.matched == "grammar"


def test_one_may_wait_for_its_grammar(make_scheduler):
    grammar = ToyGrammar(seed=3, length=10)
    harness = make_scheduler()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    tokens, _ = expected_output(PROMPT, params, harness.eos, VOCAB_SIZE, None, grammar)
    harness.submit(
        "a",
        prompt=PROMPT,
        grammar=grammar,
        delivered=tokens[:4],
        max_new_tokens=20,
        message={"needs_grammar": True},
    )
    assert harness.step() is None and harness.matchers.matchers == {}
    harness.scheduler.handle(GrammarReady("a"), harness.now_s)
    harness.run_until_idle()
    assert harness.answers["a"].tokens == tokens


@pytest.mark.parametrize("late", [False, True])
def test_what_a_grammar_refused_before_is_counted_once(make_scheduler, late):
    """The counts of the delivered tokens come with them; the others are generated, and counted, again."""
    grammar = ToyGrammar(seed=3, length=30)
    whole = make_scheduler()
    whole._fake_runner.late = late
    whole.submit("a", prompt=PROMPT, grammar=grammar, max_new_tokens=40)
    whole.run_until_idle()
    rows = whole.answers["a"].rows
    total = rows[-1].usage.grammar
    assert total is not None and total.overruled_tokens > 10

    for num_delivered in (1, 7, 29):
        before = rows[num_delivered - 1].usage
        assert before.completion_tokens == num_delivered
        harness = make_scheduler()
        harness._fake_runner.late = late
        tokens = whole.answers["a"].tokens[:num_delivered]
        harness.submit("a", prompt=PROMPT, grammar=grammar, delivered=tokens, usage=before, max_new_tokens=40)
        while harness.scheduler.num_unfinished:
            harness.step()
        usage = harness.answers["a"].rows[-1].usage.grammar
        assert usage is not None
        assert usage.overruled_tokens == total.overruled_tokens
        assert usage.first_overruled == total.first_overruled


def test_the_time_to_compile_is_that_of_all_attempts(make_scheduler):
    harness = make_scheduler()
    usage = Usage(len(PROMPT), 1, grammar=GrammarUsage(0.5, 1.0, 2, 3, cut_at=0))
    tokens = expected_output(
        PROMPT, SamplingParams(max_new_tokens=4), harness.eos, VOCAB_SIZE, None, ToyGrammar()
    )[0]
    harness.submit(
        "a",
        prompt=PROMPT,
        grammar=ToyGrammar(),
        delivered=tokens[:1],
        usage=usage,
        message={"needs_grammar": True},
    )
    harness.scheduler.handle(GrammarReady("a", compile_s=0.25), harness.now_s)
    harness.collect()
    while harness.scheduler.num_unfinished:
        harness.step()
    grammar = harness.answers["a"].rows[-1].usage.grammar
    assert grammar is not None
    assert (grammar.compile_s, grammar.forced_tokens, grammar.cut_at) == (0.75, 2, 0)
    assert grammar.mask_s >= 1.0 and grammar.overruled_tokens >= 3
