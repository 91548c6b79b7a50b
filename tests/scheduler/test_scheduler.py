"""Tests of `scheduler/scheduler.py`: the life of requests, step by step."""

import msgspec
import numpy as np
import pytest

from engine.runtime.messages import FinishKind, GenerateRequest, TextOptions
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode
from engine.scheduler.records.verdict import AddReqResult

from .fake_runner import ints
from .harness import VOCAB_SIZE, Answer, Pages, extend_lens

# ---------------------------------------------------------------- steps


def test_chunked_prefill_returns_every_page(make_scheduler):
    scheduler = make_scheduler(chunked_prefill_size=8, page_size=4, num_pages=16)
    scheduler.submit(prompt_len=20, max_new_tokens=1)

    steps = scheduler.run_until_idle()

    assert [extend_lens(step) for step in steps] == [[8], [8], [4]]
    assert scheduler.pages() == Pages(free=11, cached=5, held=0)


def test_a_step_is_a_flat_list_of_tokens_and_the_finished_give_their_pages_back(make_scheduler):
    """A with 100 tokens, B with 50, C with 10 decode; D has finished."""
    harness = make_scheduler(page_size=4, num_pages=64, radix_cache=False, chunked_prefill_size=-1)
    lengths = {"A": 100, "B": 50, "C": 10, "D": 20}
    for rid, length in lengths.items():
        harness.submit(rid, prompt_len=length, max_new_tokens=1 if rid == "D" else 5)
    first = harness.step()
    assert extend_lens(first) == [100, 50, 10, 20] and first.plan.total_num_scheduled_tokens == 180
    free_before = harness.pages().free

    batch = harness.step()

    assert [req.rid for req in batch.reqs] == ["A", "B", "C"]
    assert ints(batch.plan.num_scheduled_tokens) == [1, 1, 1]
    assert batch.plan.total_num_scheduled_tokens == 3
    assert ints(batch.plan.num_computed_tokens) == [100, 50, 10]
    assert ints(batch.plan.finished_rows) == [3]
    assert free_before == 64 - 25 - 13 - 3  # D's five are back
    assert harness.pages().free == free_before - 1  # only A stood at the end of a page
    harness.run_until_idle()


def test_mixed_steps_put_extends_before_decodes(make_scheduler):
    harness = make_scheduler()
    harness.submit("old", prompt_len=5, max_new_tokens=9)
    harness.step()
    harness.submit("new", prompt_len=6, max_new_tokens=9)

    batch = harness.step()

    assert batch.plan.mode is ForwardMode.MIXED
    assert [req.rid for req in batch.reqs] == ["new", "old"]
    assert ints(batch.plan.num_scheduled_tokens) == [6, 1]
    harness.run_until_idle()


def test_without_mixing_prompts_go_first_but_not_for_ever(make_scheduler):
    harness = make_scheduler(phases="prefill-first", max_prefill_steps_in_a_row=2, chunked_prefill_size=8)
    harness.submit(prompt_len=8, max_new_tokens=20)
    harness.submit(prompt_len=64, max_new_tokens=1)

    modes = [step.plan.mode for step in harness.run_until_idle()]

    e, d = ForwardMode.EXTEND, ForwardMode.DECODE
    assert modes[:10] == [e, e, d, e, e, d, e, e, d, e]


def test_the_first_chunk_carries_the_request_and_later_ones_do_not(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=8)
    harness.submit(prompt=list(range(1, 21)), max_new_tokens=2)

    steps = harness.run_until_idle()

    assert [len(step.plan.new_reqs) for step in steps] == [1, 0, 0, 0]
    (new,) = steps[0].plan.new_reqs
    assert ints(new.input_ids) == list(range(1, 21)) and new.prompt_len == 20
    assert [ints(bytes(step.plan.samples) + b"\0" * 3) for step in steps] == [[0], [0], [1], [1]]


# ---------------------------------------------------------------- prefix cache


def test_a_follower_computes_only_what_is_new(make_scheduler):
    harness = make_scheduler(page_size=4)
    prompt = list(range(1, 31))
    harness.submit("first", prompt=prompt, max_new_tokens=3)
    harness.step()
    harness.submit("second", prompt=[*prompt, 60, 61], max_new_tokens=3)

    batch = harness.step()  # the first one still runs

    assert extend_lens(batch) == [4]
    assert harness.answers["second"].rows[0].usage.cached_tokens == 28
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).totals.cached_tokens == 28


def test_chunks_are_shared_before_the_prompt_is_complete(make_scheduler):
    harness = make_scheduler(page_size=4, chunked_prefill_size=8, max_running_requests=2)
    prompt = list(range(1, 33))
    harness.submit("first", prompt=prompt, max_new_tokens=1)
    harness.submit("second", prompt=prompt, max_new_tokens=1)

    steps = harness.run_until_idle()

    assert sum(sum(extend_lens(step)) for step in steps) == 32 + 4  # the last page's token has to be computed


def test_equal_prompts_in_one_step_share_pages_afterwards(make_scheduler):
    harness = make_scheduler(
        page_size=4, num_pages=64, chunked_prefill_size=128, in_batch_prefix_caching=False
    )
    prompt = list(range(1, 33))
    for _ in range(3):
        harness.submit(prompt=prompt, max_new_tokens=5)
    harness.step()
    assert harness.pages() == Pages(free=56, cached=8, held=0)  # three computed it, one copy is left

    batch = harness.step()

    assert [(update.start, len(update.loc) // 4) for update in batch.plan.row_updates] == [(0, 32), (0, 32)]
    harness.run_until_idle()


def test_pages_that_move_in_several_settled_steps_are_told_in_one_update(make_scheduler):
    harness = make_scheduler(page_size=4, chunked_prefill_size=128, in_batch_prefix_caching=False)
    prompt = list(range(1, 33))
    for rid in ("faster", "slower"):
        harness.submit(rid, prompt=prompt, max_new_tokens=5)
    (batch, kv, states) = (
        harness.scheduler.next_batch(0.0),
        harness.scheduler._parts.memory.kv,
        harness.scheduler._parts.memory.states,
    )
    for num_settled in (8, 16, 32):  # as if it came in three chunks, settled before the next step is planned
        states.num_settled[batch.rows] = num_settled
        for req in batch.reqs:
            kv.cache_settled(req)

    assert kv.take_moved() == [(batch.reqs[1].row, 0, 32)]
    harness.scheduler.audit()


def test_a_repeated_prompt_computes_its_last_token_again(make_scheduler):
    harness = make_scheduler(page_size=4)
    prompt = list(range(1, 33))
    harness.submit(prompt=prompt, max_new_tokens=1)
    harness.run_until_idle()
    harness.submit(prompt=prompt, max_new_tokens=1)

    (batch,) = harness.run_until_idle()

    assert extend_lens(batch) == [4]  # at least one token, and whole pages are shared


def test_an_answer_can_be_continued_from_the_cache(make_scheduler):
    harness = make_scheduler(page_size=4)
    first = harness.submit(prompt_len=10, max_new_tokens=11)
    harness.run_until_idle()
    turn = harness.answers[first].prompt + harness.answers[first].tokens

    second = harness.submit(prompt=[*turn, 5, 6], max_new_tokens=1)
    harness.run_until_idle()

    assert harness.answers[second].rows[0].usage.cached_tokens == 20  # of 21; the last token never got KV


def test_flush_drops_what_nobody_uses(make_scheduler):
    harness = make_scheduler(page_size=4)
    harness.submit(prompt_len=16, max_new_tokens=1)
    harness.run_until_idle()
    harness.submit(prompt_len=8, max_new_tokens=5)
    harness.step()

    done = harness.flush()

    assert (done.flushed_tokens, done.kept_tokens) == (16, 8)
    harness.run_until_idle()


# ---------------------------------------------------------------- ends


def test_stop_goes_before_length(make_scheduler):
    harness = make_scheduler()
    probe = harness.submit(prompt=[1, 2, 3], max_new_tokens=3)
    harness.run_until_idle()
    third = harness.answers[probe].tokens[2]

    rid = harness.submit(prompt=[1, 2, 3], max_new_tokens=3, stop_token_ids=(third,))
    harness.run_until_idle()

    finish = harness.answers[rid].finish
    assert finish.kind is FinishKind.STOP and finish.matched == third
    assert harness.answers[rid].tokens[-1] == third  # the stop token is in the row; the text leaves it out


def test_end_of_sequence_ends_unless_ignored(make_scheduler):
    probe = make_scheduler()
    rid = probe.submit(prompt=[1, 2, 3], max_new_tokens=10)
    probe.run_until_idle()
    tokens = probe.answers[rid].tokens
    eos = next(token for k, token in enumerate(tokens) if token not in tokens[:k] and k >= 2)

    harness = make_scheduler(eos=(eos,))
    stopped = harness.submit(prompt=[1, 2, 3], max_new_tokens=10, ignore_eos=False)
    ignored = harness.submit(prompt=[1, 2, 3], max_new_tokens=10, ignore_eos=True)
    harness.run_until_idle()

    assert harness.answers[stopped].tokens == tokens[: tokens.index(eos) + 1]
    assert harness.answers[stopped].finish.matched == eos
    assert harness.answers[ignored].tokens == tokens


def test_min_new_tokens_is_respected(make_scheduler):
    harness = make_scheduler(eos=tuple(range(0, VOCAB_SIZE, 2)))
    rid = harness.submit(prompt=[1, 2, 3], max_new_tokens=30, min_new_tokens=7, ignore_eos=False)
    harness.run_until_idle()

    assert len(harness.answers[rid].tokens) >= 8


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_request_that_fails_alone_ends_alone(make_scheduler, overlap):
    harness = make_scheduler(overlap=overlap)
    bad = harness.submit("bad", prompt_len=9, max_new_tokens=9)
    good = harness.submit("good", prompt_len=9, max_new_tokens=9)
    harness.step()
    harness.step()
    harness.runner.fail_next.add(bad)
    harness.run_until_idle()

    finish = harness.answers[bad].finish
    assert (finish.kind, finish.status, finish.message) == (FinishKind.ERROR, 500, "logits are not finite")
    assert harness.answers[good].finish.kind is FinishKind.LENGTH


def test_the_first_row_carries_the_text_options(make_scheduler):
    harness = make_scheduler()
    rid = harness.submit(stop=("###",), include_stop_str_in_output=True, skip_special_tokens=False)
    harness.run_until_idle()

    rows = harness.answers[rid].rows
    assert rows[0].options == TextOptions(("###",), True, False)
    assert all(row.options is None for row in rows[1:])


def test_usage_counts_up_in_each_row(make_scheduler):
    harness = make_scheduler(max_running_requests=1)
    harness.submit(prompt_len=6, max_new_tokens=3)
    rid = harness.submit(prompt_len=7, max_new_tokens=3)
    harness.run_until_idle()

    rows = harness.answers[rid].rows
    assert [row.usage.completion_tokens for row in rows] == [1, 2, 3]
    assert {row.usage.prompt_tokens for row in rows} == {7}
    assert [row.usage.queue_s for row in rows] == [
        pytest.approx(0.04)
    ] * 3  # three steps of another, then its own


# ---------------------------------------------------------------- log-probabilities


def test_prompt_logprobs_come_complete_in_the_first_row(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=8, page_size=4)
    prompt = list(range(1, 22))
    harness.submit(prompt=prompt, max_new_tokens=2)
    harness.run_until_idle()

    rid = harness.submit(prompt=prompt, max_new_tokens=2, prompt_logprobs=0)
    steps = harness.run_until_idle()

    assert [extend_lens(step) for step in steps[:3]] == [[8], [8], [5]]  # nothing taken from the cache
    first, *others = harness.answers[rid].rows
    positions = np.frombuffer(first.prompt_logprobs.token_logprobs, dtype=np.float32)
    assert positions.tolist() == list(range(1, 21))
    assert np.frombuffer(first.prompt_logprobs.ranks, dtype=np.int32).tolist() == list(range(1, 21))
    assert all(row.prompt_logprobs is None for row in others)
    assert first.usage.cached_tokens == 0


@pytest.mark.parametrize(("start", "cached"), [(3, 0), (4, 4), (13, 12), (20, 20), (30, 20)])
def test_prompt_logprobs_from_a_position_on_leave_the_tokens_before_to_the_cache(
    make_scheduler, start, cached
):
    harness = make_scheduler(chunked_prefill_size=8, page_size=4)
    prompt = list(range(1, 22))
    harness.submit(prompt=prompt, max_new_tokens=2)
    harness.run_until_idle()

    rid = harness.submit(prompt=prompt, max_new_tokens=2, prompt_logprobs=0, prompt_logprobs_start=start)
    harness.run_until_idle()
    first = harness.answers[rid].rows[0]
    positions = np.frombuffer(first.prompt_logprobs.token_logprobs, dtype=np.float32)
    assert positions.tolist() == list(range(start + 1, 21))
    assert first.usage.cached_tokens == cached


def test_logprobs_go_to_those_who_asked(make_scheduler):
    harness = make_scheduler()
    asked = harness.submit(prompt_len=5, max_new_tokens=3, logprobs=0)
    other = harness.submit(prompt_len=7, max_new_tokens=3)
    harness.run_until_idle()

    values = [
        np.frombuffer(row.logprobs.token_logprobs, np.float32)[0] for row in harness.answers[asked].rows
    ]
    assert values == [5.0, 6.0, 7.0]
    assert all(row.logprobs is None for row in harness.answers[other].rows)


def test_prompt_logprobs_of_a_retracted_prompt_are_not_doubled(make_scheduler):
    harness = make_scheduler(
        num_pages=24, page_size=4, chunked_prefill_size=8, schedule_conservativeness=0.01, eos=()
    )
    harness.submit(prompt_len=4, max_new_tokens=66, ignore_eos=False)
    for _ in range(20):
        harness.step()
    rid = harness.submit("asks", prompt_len=60, max_new_tokens=5, prompt_logprobs=0, ignore_eos=False)
    harness.run_until_idle()

    assert any(record.retracted == ["asks"] for record in harness.scheduler.decisions.passes)
    first = harness.answers[rid].rows[0]
    assert first.usage.completion_tokens == 1 and first.usage.num_retractions == 1
    positions = np.frombuffer(first.prompt_logprobs.token_logprobs, dtype=np.float32)
    assert positions.tolist() == list(range(1, 60))


def test_who_has_got_its_prompt_logprobs_uses_the_cache_after_a_retraction(make_scheduler):
    harness = make_scheduler(num_pages=20, page_size=4, schedule_conservativeness=0.01, eos=())
    harness.submit("a", prompt_len=8, max_new_tokens=60, ignore_eos=False)
    harness.step()
    rid = harness.submit("b", prompt_len=20, max_new_tokens=30, ignore_eos=False, prompt_logprobs=0)
    harness.step()
    req = harness.scheduler._parts.requests.by_id[rid]
    while not req.num_retractions:
        harness.step()
    while req.row < 0:
        harness.step()

    again = harness.verdicts_about(rid)[-1]
    assert again.result is AddReqResult.CONTINUE and again.prefix_len > 0
    assert req.prompt_logprobs == []  # nobody would ever send them
    harness.run_until_idle()
    assert [row.prompt_logprobs is not None for row in harness.answers[rid].rows] == [True] + [False] * 29


# ---------------------------------------------------------------- refusals


def refused(harness, rid, ids, **sampling):
    """Send something that must be refused; returns the finish of its row."""
    usual = SamplingParams(max_new_tokens=4, seed=1)
    params = msgspec.structs.replace(usual, **sampling)  # checks nothing
    if rid not in harness.answers:
        harness.answers[rid] = Answer([0] * (len(ids) // 4), params)
    harness.scheduler.handle(GenerateRequest(rid, ids, params), 0.0)
    (message,) = harness.scheduler.take_outputs()
    (row,) = message.outputs
    assert row.rid == rid and row.options is not None
    assert row.finish.kind is FinishKind.ERROR and row.finish.status == 400
    return row.finish.message


@pytest.mark.parametrize(
    ("ids", "sampling", "text"),
    [
        (b"", {}, "at least one"),
        (b"\1\2\3", {}, "has 3 bytes"),
        (np.array([5, VOCAB_SIZE], np.int32).tobytes(), {}, f"token id {VOCAB_SIZE}"),
        (np.array([5, -1], np.int32).tobytes(), {}, "token id -1"),
        (np.zeros(600, np.int32).tobytes(), {}, "the context holds 512"),
        (np.zeros(60, np.int32).tobytes(), {"max_new_tokens": 300}, "the KV pool has 256"),
        (np.zeros(6, np.int32).tobytes(), {"max_new_tokens": None}, "max_new_tokens is not set"),
        (np.zeros(6, np.int32).tobytes(), {"seed": None}, "seed is not set"),
        (np.zeros(6, np.int32).tobytes(), {"top_k": 2**40}, "top_k is 1099511627776"),
        (np.zeros(6, np.int32).tobytes(), {"temperature": float("nan")}, "temperature is nan"),
        (np.zeros(6, np.int32).tobytes(), {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
    ],
)
def test_what_can_never_run_is_answered_at_once(make_scheduler, ids, sampling, text):
    harness = make_scheduler(num_pages=64, page_size=4)

    assert text in refused(harness, "bad", ids, **sampling)

    assert harness.scheduler.num_unfinished == 0
    harness.scheduler.on_idle()


@pytest.mark.parametrize("ids", [np.zeros(6, np.int32).tobytes(), b""], ids=["sound", "bad"])
def test_a_second_request_with_the_id_of_a_live_one_does_not_end_that_one(make_scheduler, caplog, ids):
    """An answer to it would reach the reader of the first."""
    harness = make_scheduler()
    harness.submit("twice", prompt_len=4)

    harness.scheduler.handle(GenerateRequest("twice", ids, SamplingParams(max_new_tokens=4, seed=1)), 0.0)

    assert harness.scheduler.take_outputs() == []
    assert "rid=twice" in caplog.text
    harness.run_until_idle()
    assert harness.answers["twice"].finish.kind is FinishKind.LENGTH


def test_a_request_id_can_be_used_again_when_it_is_free(make_scheduler):
    harness = make_scheduler()
    for _ in range(2):
        harness.submit("again", prompt_len=4)
        harness.run_until_idle()


# ---------------------------------------------------------------- the runner hears of it


@pytest.mark.parametrize("how", ["length", "abort"])
def test_when_the_last_request_leaves_a_step_without_tokens_tells_the_runner(make_scheduler, how):
    harness = make_scheduler()
    rid = harness.submit(prompt_len=4, max_new_tokens=2 if how == "length" else 100)
    harness.step()
    harness.step()
    if how == "abort":
        harness.abort(rid)
    assert list(harness.runner.rows) == [0]

    batch = harness.step()

    assert (batch.plan.mode, ints(batch.plan.finished_rows)) == (ForwardMode.IDLE, [0])
    assert batch.plan.total_num_scheduled_tokens == 0 and batch.reqs == []
    assert harness.runner.rows == {}
    assert harness.step() is None
    assert harness.scheduler.report(0.0).totals.num_steps == 2  # it is no step in the statistics


def test_who_never_ran_needs_no_such_step(make_scheduler):
    harness = make_scheduler()
    harness.abort(harness.submit())

    assert harness.step() is None


# ---------------------------------------------------------------- aborts


def test_an_abort_of_a_waiting_request_answers_it(make_scheduler):
    harness = make_scheduler(max_running_requests=1)
    harness.submit("running")
    harness.submit("waiting")
    harness.step()

    harness.abort("waiting", "client disconnected")

    finish = harness.answers["waiting"].finish
    assert (finish.kind, finish.message) == (FinishKind.ABORT, "client disconnected")
    assert harness.answers["waiting"].tokens == []
    harness.run_until_idle()


def test_aborts_are_idempotent_and_unknown_ones_are_ignored(make_scheduler):
    harness = make_scheduler()
    rid = harness.submit()
    harness.abort("nobody")
    harness.abort(rid)
    harness.abort(rid)

    assert len(harness.answers[rid].rows) == 1
    harness.run_until_idle()


def test_an_abort_keeps_what_was_computed_for_the_next_try(make_scheduler):
    harness = make_scheduler(page_size=4)
    rid = harness.submit(prompt_len=20, max_new_tokens=50)
    harness.step()
    harness.abort(rid)
    assert harness.pages() == Pages(free=59, cached=5, held=0)

    harness.submit(prompt=harness.answers[rid].prompt, max_new_tokens=2)

    assert extend_lens(harness.step()) == [4]
    harness.run_until_idle()


# ---------------------------------------------------------------- the same again


def test_same_calls_same_decisions(make_scheduler):
    def plans():
        harness = make_scheduler(num_pages=20, page_size=4, chunked_prefill_size=8, schedule_policy="lpm")
        for k in range(12):
            harness.submit(prompt_len=3 + 5 * k % 17, max_new_tokens=2 + 7 * k % 19)
            harness.step()
        return [batch.plan for batch in harness.run_until_idle()]

    assert plans() == plans()


def test_the_report_adds_up(make_scheduler):
    harness = make_scheduler(page_size=4, max_running_requests=2)
    for _ in range(4):
        harness.submit(prompt_len=8, max_new_tokens=3)
    harness.step()

    report = harness.scheduler.report(7.0)
    assert (report.sent_s, report.num_running_reqs, report.num_queue_reqs) == (7.0, 2, 2)
    assert report.num_queue_tokens == 16
    assert (report.totals.prompt_tokens, report.totals.generation_tokens, report.totals.num_steps) == (
        16,
        2,
        1,
    )
    assert report.totals.step_s == pytest.approx(0.01)

    harness.run_until_idle()
    report = harness.scheduler.report(8.0)
    assert report.num_queue_tokens == 0
    assert report.totals.generation_tokens == 12 and report.kv.total_tokens == 256
