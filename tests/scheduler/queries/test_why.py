"""Why a request fared as it did: the sentence and the table, from crafted records and from a scheduler's own."""

from __future__ import annotations

import pytest

from engine.runtime.messages import Call, Explain, Explanation, FinishKind, GrammarReady
from engine.scheduler.queries.why import COLUMNS, MAX_ROWS, explain
from engine.scheduler.records.decision_log import (
    Arrived,
    DecisionLog,
    DecisionRecord,
    Finished,
    PassRecord,
    Retraction,
    Settled,
)
from engine.scheduler.records.verdict import AddReqResult, CacheMiss, MissKind, Reason, Verdict


def no_kv(rid: str, need: int = 40, have: int = 30) -> Verdict:
    return Verdict(rid, AddReqResult.NO_TOKEN, Reason.NO_KV, 0, 20, 20, need, have)


def admitted(
    rid: str, reason: Reason = Reason.ADMITTED, prefix_len: int = 0, extend_len: int = 20
) -> Verdict:
    return Verdict(rid, AddReqResult.CONTINUE, reason, prefix_len, extend_len, 5, 25, 100)


def a_pass(step_id: int, *verdicts: Verdict, **fields: object) -> PassRecord:
    return PassRecord(10.0 + step_id / 10, step_id, verdicts=list(verdicts), **fields)  # type: ignore[arg-type]


ARRIVED = Arrived(10.0, "r1", 20, 5)
ENDED = Settled(12.0, 9, left=[Finished("r1", FinishKind.LENGTH, 5)])


def test_a_request_that_waited_for_nothing():
    answer = explain([ARRIVED, a_pass(1, admitted("r1")), ENDED], "r1")

    assert (answer.found, answer.columns) == (True, COLUMNS)
    assert answer.sentence == (
        "r1 was started in the first pass after it came, and ended after 2.000 s with 5 tokens (length)."
    )
    assert answer.rows == (
        ("0.000 s", "", "came", "prompt of 20 tokens, at most 5 new ones", "", ""),
        ("0.100 s", "step 1", "started", "admitted: 0 cached, 20 computed", "25", "100"),
        ("2.000 s", "", "ended", "length, 5 tokens", "", ""),
    )


def test_drafts_that_were_right_are_told():
    left = Finished("r1", FinishKind.LENGTH, 50, "", 40, 31, draft_methods=("ngram", "mtp"))
    ended = Settled(12.0, 9, left=[left])
    answer = explain([ARRIVED, a_pass(1, admitted("r1")), ended], "r1")
    assert answer.sentence.endswith(
        "with 50 tokens (length; 2.6 tokens a step; 78% of 40 drafts right (ngram, mtp))."
    )
    assert answer.rows[-1][3] == "length, 50 tokens; 2.6 tokens a step; 78% of 40 drafts right (ngram, mtp)"


def test_equal_verdicts_are_one_line_with_the_last_arithmetic():
    passes = [a_pass(step, no_kv("r1", have=30 + step)) for step in range(1, 5)]

    answer = explain([ARRIVED, *passes, a_pass(5, admitted("r1")), ENDED], "r1")

    assert answer.rows[1] == ("0.100 - 0.400 s", "4, steps 1-4", "waited", "KV memory is short", "40", "34")
    assert answer.sentence.startswith(
        "r1 waited 0.500 s in 4 passes, because KV memory is short (need 40, have 34), and ended"
    )


def test_where_it_has_no_verdict_of_its_own_that_of_the_rest_counts():
    passes = [
        a_pass(step, no_kv("r0"), num_waiting=3, num_rest=2, rest_reason=Reason.BEHIND, rest_behind="r0")
        for step in range(1, 4)
    ]

    answer = explain([ARRIVED, *passes, a_pass(4, no_kv("r1"))], "r1")

    assert answer.rows[1][1:4] == ("3, steps 1-3", "waited", "the pass ended before it (r0)")
    assert (
        answer.sentence
        == "r1 has waited 0.400 s in 4 passes, in 3 of them because the pass ended before it (r0)."
    )


def test_the_rest_does_not_concern_who_runs_or_is_gone():
    rest = {"num_waiting": 1, "num_rest": 1, "rest_reason": Reason.NO_ROW}

    answer = explain(
        [a_pass(1, **rest), ARRIVED, a_pass(2, admitted("r1")), a_pass(3, **rest), ENDED, a_pass(4, **rest)],
        "r1",
    )

    assert [row[2] for row in answer.rows] == ["came", "started", "ended"]


def test_a_prompt_in_chunks():
    records: list[DecisionRecord] = [
        ARRIVED,
        a_pass(1, admitted("r1", Reason.CHUNKED, extend_len=8)),
        a_pass(2, continued=[admitted("r1", Reason.CHUNK_CONTINUED, 8, 8)]),
        a_pass(3, continued=[admitted("r1", Reason.CHUNK_CONTINUED, 16, 4)]),
        ENDED,
    ]

    answer = explain(records, "r1")

    assert (
        "computed its prompt in 3 chunks, 20 tokens (admitted in part: the chunk budget ends"
        in answer.sentence
    )
    assert answer.rows[2][1:4] == ("2, steps 2-3", "computed", "its prompt is computed further: 12 computed")


@pytest.mark.parametrize(
    ("miss", "words"),
    [
        (
            CacheMiss("r1", 20, 8, MissKind.DIFFERS, 11),
            "8 of 20 prompt tokens in the cache (the nearest cached prompt differs from here on, token 11)",
        ),
        (
            CacheMiss("r1", 20, 4, MissKind.EVICTED, 4, 17),
            "4 of 20 prompt tokens in the cache (the rest had been cached and was evicted to make room, "
            "eviction no. 17)",
        ),
        (
            CacheMiss("r1", 20, 4, MissKind.EVICTED, 4, 17, lost_s=41.25, idle_s=1207.5),
            "4 of 20 prompt tokens in the cache (the rest had been cached and was evicted to make room, 41.250 s ago "
            "and 1,207.500 s after its last use, eviction no. 17)",
        ),
        (
            CacheMiss("r1", 20, 4, MissKind.FLUSHED, 4, lost_s=2.0),
            "4 of 20 prompt tokens in the cache (the rest had been cached, until the whole cache was emptied, "
            "2.000 s ago and 0.000 s after its last use)",
        ),
        (
            CacheMiss("r1", 20, 0, MissKind.OTHER_NAMESPACE, 0),
            "0 of 20 prompt tokens in the cache (the same tokens are cached under another cache salt",
        ),
        (
            CacheMiss("r1", 20, 16, MissKind.ROUNDING, 19),
            "16 of 20 prompt tokens in the cache (prefixes are shared in whole pages",
        ),
    ],
)
def test_why_the_cache_had_not_more(miss, words):
    answer = explain([ARRIVED, a_pass(1, admitted("r1"), cache_misses=[miss])], "r1")

    assert f"found {words}" in answer.sentence
    assert answer.rows[2][2] == "cache"
    assert answer.rows[2][3].startswith(words)


def test_a_place_that_was_lost():
    lost = Retraction("r1", "recompute", "memory", 6, 3)
    swapped = Retraction("r1", "swap", "priority", 7, 4)
    records: list[DecisionRecord] = [
        ARRIVED,
        a_pass(1, admitted("r1")),
        a_pass(4, retractions=[lost], num_rest=1, rest_reason=Reason.RETRACTING),
        a_pass(5, admitted("r1")),
        a_pass(6, retractions=[swapped]),
        a_pass(7, admitted("r1", Reason.SWAPPED_IN, 24, 0)),
        ENDED,
    ]

    answer = explain(records, "r1")

    assert [row[2] for row in answer.rows] == [
        "came",
        "started",
        "retracted",
        "started",
        "swapped out",
        "started",
        "ended",
    ]
    assert answer.rows[2][3] == (
        "KV memory ran out; after 3 generated tokens its 23 tokens must be computed again, except those that are "
        "still cached"
    )
    assert answer.rows[4][3].endswith("after 4 generated tokens its 7 pages went to the host")
    assert "was retracted 1x because KV memory ran out, 1x because a more urgent request took its place" in (
        answer.sentence
    )


def test_a_grammar_that_is_not_ready():
    answer = explain([ARRIVED, a_pass(1, num_waiting=1, num_grammar=1)], "r1")

    assert answer.rows[-1][3] == Reason.GRAMMAR_PENDING.text


def test_how_long_a_grammar_took_and_that_it_ended_the_answer():
    records: list[DecisionRecord] = [
        Arrived(10.0, "r1", 20, 50, needs_grammar=True),
        a_pass(1, num_waiting=1, num_grammar=1),
        Settled(10.25, 0, grammars=["other", "r1"]),
        a_pass(3, admitted("r1")),
        Settled(12.0, 9, left=[Finished("r1", FinishKind.STOP, 7)], grammar_ends={"r1": ""}),
    ]
    answer = explain(records, "r1")
    assert answer.sentence == (
        "r1 waited 0.300 s in 1 pass, because its grammar is being compiled, had its grammar after 0.250 s, and ended "
        "after 2.000 s with 7 tokens (stop, ended by its grammar)."
    )
    assert answer.rows[-1][3] == "stop, 7 tokens, ended by its grammar"


def test_how_often_a_grammar_overruled_the_model():
    end = Settled(
        12.0, 9, left=[Finished("r1", FinishKind.STOP, 70, num_overruled=12)], grammar_ends={"r1": ""}
    )
    answer = explain([ARRIVED, a_pass(1, admitted("r1")), end], "r1")
    assert answer.sentence.endswith("(stop, ended by its grammar; its grammar overruled 12 of its tokens).")
    assert answer.rows[-1][3].endswith("; its grammar overruled 12 of its tokens")


def test_a_grammar_that_failed_says_why_in_its_message():
    end = Settled(
        12.0, 9, left=[Finished("r1", FinishKind.ERROR, 7, "no token")], grammar_ends={"r1": "no token"}
    )
    answer = explain([ARRIVED, a_pass(1, admitted("r1")), end], "r1")
    assert answer.sentence.endswith("with 7 tokens (error: no token).")


@pytest.mark.parametrize("delivered", [(), (5, 6)])
def test_a_grammar_that_came_before_the_first_record_is_known(make_scheduler, delivered):
    harness = make_scheduler(decisions=DecisionLog(8))
    arrived_s = harness.now_s
    harness.submit("g", message={"needs_grammar": True}, max_new_tokens=60, delivered=delivered)
    for _ in range(3):
        harness.step()
    harness.scheduler.handle(GrammarReady("g"), harness.now_s)
    took_s = harness.now_s - arrived_s
    for _ in range(20):
        harness.step()
    assert all(not isinstance(each, Settled) or not each.grammars for each in harness.scheduler.decisions)
    harness.scheduler.handle(Call(1, Explain("g")), harness.now_s)
    (done,) = harness.scheduler.take_call_answers()
    assert isinstance(done.answer, Explanation)
    assert f"had its grammar after {took_s:.3f} s" in done.answer.sentence


def test_an_end_that_is_a_message():
    end = Settled(
        11.0, 0, left=[Finished("r1", FinishKind.ABORT, 0, "it waited longer than --queue-timeout")]
    )

    answer = explain([ARRIVED, end], "r1")

    assert answer.sentence.endswith("with 0 tokens (abort: it waited longer than --queue-timeout).")


def test_an_http_id_means_its_first_choice():
    records: list[DecisionRecord] = [
        Arrived(10.0, "chatcmpl-7-0", 20, 5),
        Arrived(10.0, "chatcmpl-7-1", 20, 5),
        a_pass(1, admitted("chatcmpl-7-0")),
    ]

    answer = explain(records, "chatcmpl-7")

    assert answer.found
    assert answer.sentence.startswith("chatcmpl-7-0 was started")
    assert answer.sentence.endswith("It is one of 2 choices; ask for chatcmpl-7-1 as well.")


def test_an_unknown_id_is_told_what_is_known():
    answer = explain([Arrived(10.0, "chatcmpl-abc-0", 20, 5), a_pass(5)], "chatcmpl-abd")

    assert not answer.found
    assert answer.sentence == (
        "Nothing is known of chatcmpl-abd: remembered are 2 decisions of 0.5 s, about 1 request, such as "
        "chatcmpl-abc-0."
    )
    assert not explain([], "r1").found


def test_what_is_no_longer_remembered_is_said():
    answer = explain([a_pass(3, no_kv("r1")), a_pass(4, admitted("r1"))], "r1")

    assert answer.sentence.endswith("(what came before is no longer remembered).")


def test_a_tenant_may_be_an_api_key_and_is_not_told():
    answer = explain([Arrived(10.0, "r1", 20, 5, 3, "sk-secret")], "r1")

    assert "sk-secret" not in repr(answer)
    assert "priority 3" in answer.rows[0][3]


def test_a_turn_of_a_session_is_named_by_the_beginning_of_its_key():
    arrived = Arrived(10.0, "r1", 20, 5, session="3f2a99c0d1e2f3a4", turn=1012)
    miss = CacheMiss("r1", 14_902, 14_336, MissKind.EVICTED, 14_336, 7)
    answer = explain([arrived, a_pass(1, admitted("r1"), cache_misses=[miss]), ENDED], "r1")

    assert (
        "found, as turn 1,012 of session 3f2a, 14,336 of 14,902 prompt tokens in the cache" in answer.sentence
    )
    assert answer.rows[0][3] == "prompt of 20 tokens, at most 5 new ones, turn 1,012 of session 3f2a"


def test_a_long_story_is_cut_in_the_middle():
    reasons = [Reason.NO_ROW, Reason.CHUNK_BUDGET]
    passes = [a_pass(step, num_rest=1, rest_reason=reasons[step % 2]) for step in range(1, 1000)]

    answer = explain([ARRIVED, *passes, a_pass(1000, admitted("r1")), ENDED], "r1")

    assert len(answer.rows) == MAX_ROWS + 1
    assert answer.rows[MAX_ROWS // 2][3] == "802 more lines"
    assert [row[2] for row in answer.rows[-2:]] == ["started", "ended"]


def test_every_pass_of_a_real_wait_is_accounted_for(make_scheduler):
    harness = make_scheduler(num_pages=16, max_running_requests=2, chunked_prefill_size=16)
    rids = [harness.submit(prompt_len=24, max_new_tokens=20) for _ in range(6)]
    harness.run_until_idle()
    records = list(harness.scheduler.decisions)

    for rid in rids:
        answer = explain(records, rid)
        waited = sum(
            int(row[1].split(",")[0]) if "," in row[1] else 1 for row in answer.rows if row[2] == "waited"
        )
        start = next(
            idx
            for idx, record in enumerate(records)
            if isinstance(record, PassRecord)
            and any(each.rid == rid and each.result is AddReqResult.CONTINUE for each in record.verdicts)
        )
        assert waited == sum(isinstance(record, PassRecord) for record in records[:start])
        assert answer.sentence.startswith(f"{rid} waited" if waited else f"{rid} was started")
        assert answer.rows[-1][2] == "ended"


def test_who_ended_before_any_pass_was_never_started():
    end = Settled(12.0, 0, left=[Finished("r1", FinishKind.ABORT, 0, "aborted by request")])

    answer = explain([ARRIVED, end], "r1")

    assert answer.sentence == (
        "r1 waited 2.000 s without a pass that looked at it, was never started, and ended after 2.000 s with 0 tokens "
        "(abort: aborted by request)."
    )


def test_who_ended_while_it_waited_was_never_started():
    end = Settled(12.0, 0, left=[Finished("r1", FinishKind.ABORT, 0)])

    answer = explain([ARRIVED, a_pass(1, no_kv("r1")), end], "r1")

    assert answer.sentence.startswith("r1 waited 2.000 s in 1 pass, because KV memory is short")
    assert "was never started, and ended" in answer.sentence


def test_the_reason_of_the_rest_is_not_that_of_a_missing_grammar(make_scheduler):
    harness = make_scheduler(max_running_requests=1)
    harness.submit("run", max_new_tokens=50)
    harness.step()
    harness.submit("g", message={"needs_grammar": True})
    harness.submit("x")
    for _ in range(5):
        harness.step()
    harness.scheduler.handle(GrammarReady("g"), harness.now_s)
    for _ in range(3):
        harness.step()

    answer = explain(harness.scheduler.decisions, "g")

    waits = [(row[1].split(",")[0], row[3]) for row in answer.rows if row[2] == "waited"]
    assert waits == [("5", Reason.GRAMMAR_PENDING.text), ("3", Reason.NO_ROW.text)]


def test_what_a_flush_took_is_not_called_evicted(make_scheduler):
    harness = make_scheduler()
    harness.submit("r1", prompt=list(range(1, 41)))
    harness.run_until_idle()
    harness.flush()
    harness.submit("r2", prompt=list(range(1, 41)))
    harness.run_until_idle()

    sentence = explain(harness.scheduler.decisions, "r2").sentence

    assert MissKind.FLUSHED.text in sentence
    assert "evict" not in sentence
