"""A prefill and a decode scheduler: every request gets the tokens that it gets alone, and every page returns."""

from __future__ import annotations

import pytest

from engine.runtime.messages import FinishKind
from engine.runtime.transport.kv_transfer import AbortAck, FromPeer, PeerLost, Prefilled, WritePages
from engine.scheduler.records.decision_log import Handover

from ..grammar.toy_matcher import ToyGrammar
from ..transfer_pair import DECODE, PREFILL, Pair


def events(pair: Pair, rid: str) -> list[str]:
    decisions = pair.decode.scheduler.decisions
    return [each.event for each in decisions if isinstance(each, Handover) and each.rid == rid]


def test_a_prompt_is_computed_there_and_decoded_here() -> None:
    pair = Pair()
    rid = pair.submit("a", prompt_len=11, max_new_tokens=5)

    pair.run()

    assert events(pair, rid) == ["claimed", "received"]
    computed = sum(each.usage.cached_tokens for each in pair.decode.answers[rid].rows[:1])
    assert computed == 0  # of the prefill engine's cache
    steps = pair.decode.runner.steps
    assert steps <= 6  # five tokens, of which the first one came with the prompt; and the last IDLE step
    figures = pair.decode.scheduler.report(0.0).transfer
    assert figures is not None and (figures.transfers, figures.received_pages) == (1, 2)
    totals = pair.decode.scheduler.report(0.0).totals
    assert totals.prompt_received_tokens == totals.prompt_tokens == 11


def test_chunks_are_sent_while_the_next_one_is_computed() -> None:
    pair = Pair(prefill={"chunked_prefill_size": 8})
    pair.submit("a", prompt_len=30, max_new_tokens=3)
    sizes: list[int] = []

    def note(command: WritePages) -> bool:
        sizes.append(len(command.sources) // 4)
        return False

    pair.fails_write = note

    pair.run()

    assert sizes == [2, 2, 2, 1]


def test_a_write_names_the_step_that_has_computed_its_pages() -> None:
    pair = Pair(prefill={"chunked_prefill_size": 8})
    steps: list[int] = []

    def note(command: WritePages) -> bool:
        steps.append(command.step_id)
        return False

    pair.fails_write = note
    prompt = list(range(1, 31))
    pair.submit("a", prompt=prompt, max_new_tokens=3)
    pair.run()
    chunks = list(steps)
    pair.decode.flush()

    pair.submit("b", prompt=prompt, max_new_tokens=3)  # cached by the prefill engine
    pair.run()

    assert chunks == [1, 2, 3, 4]
    late = steps[len(chunks) :]
    assert late and all(step >= chunks[-1] for step in late)


def test_only_pages_that_are_missing_travel() -> None:
    pair = Pair()
    beginning = list(range(1, 13))
    pair.submit("a", prompt=[*beginning, 20, 21], max_new_tokens=2)
    pair.run()

    rid = pair.submit("b", prompt=[*beginning, 30, 31, 32, 33, 34], max_new_tokens=2)
    pair.run()

    figures = pair.decode.scheduler.report(0.0).transfer
    assert figures is not None and figures.received_pages == 3 + 1
    assert events(pair, rid) == ["claimed", "received"]


def test_a_prompt_that_is_cached_is_not_claimed() -> None:
    pair = Pair()
    prompt = list(range(1, 10))
    pair.submit("a", prompt=prompt, max_new_tokens=2)
    pair.run()

    rid = pair.submit("b", prompt=prompt, max_new_tokens=2)
    pair.run()

    assert events(pair, rid) == ["computed here"]
    assert pair.prefill.scheduler.report(0.0).transfer.failures == {}  # type: ignore[union-attr]


def test_parallel_samples_share_the_pages_of_one_transfer() -> None:
    pair = Pair()
    prompt = list(range(1, 12))
    rids = [
        pair.submit(f"a.{n}", rid=f"s{n}", prompt=prompt, max_new_tokens=3, message={"group": "g"})
        for n in range(3)
    ]

    pair.run()

    assert events(pair, rids[0]) == ["claimed", "received"]
    assert [events(pair, rid) for rid in rids[1:]] == [["computed here"]] * 2
    assert pair.decode.scheduler.report(0.0).transfer.received_pages == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_the_first_token_may_be_the_last_one(max_new_tokens: int) -> None:
    pair = Pair()
    rid = pair.submit("a", prompt_len=9, max_new_tokens=max_new_tokens)

    pair.run()

    assert pair.decode.answers[rid].finish.kind is FinishKind.LENGTH  # type: ignore[union-attr]


def test_a_grammar_goes_on_after_the_first_token() -> None:
    pair = Pair()
    grammar = ToyGrammar(length=4)
    rid = "g"
    pair.prefill.matchers.grammars[rid] = grammar
    pair.submit("a", rid=rid, prompt_len=9, max_new_tokens=8, grammar=grammar)

    pair.run()

    assert events(pair, rid) == ["claimed", "received"]


def test_log_probabilities_of_the_first_token_arrive() -> None:
    pair = Pair()
    rid = pair.submit("a", prompt_len=9, max_new_tokens=3, logprobs=0)

    pair.run()

    assert all(row.logprobs is not None for row in pair.decode.answers[rid].rows)


def test_prompt_log_probabilities_are_computed_here() -> None:
    pair = Pair()
    rid = pair.submit("a", prompt_len=9, max_new_tokens=2, prompt_logprobs=0)

    pair.run()

    assert events(pair, rid) == []


def test_the_claim_may_come_long_before_the_request_and_long_after_its_end() -> None:
    pair = Pair()
    early = pair.submit("a", prompt_len=9, to_prefill=False)
    pair.step()
    prompt = pair.decode.answers[early].prompt
    pair.submit("a", rid=early, prompt=prompt, to_decode=False)
    pair.run()
    assert events(pair, early) == ["claimed", "received"]

    prompt = list(range(40, 60))
    late = pair.submit("b", rid="late", prompt=prompt, to_decode=False)
    for _ in range(5):
        pair.step()
    pair.submit("b", rid=late, prompt=prompt, to_prefill=False)
    pair.run()
    assert events(pair, late) == ["claimed", "received"]


def test_pages_that_were_evicted_before_the_claim_are_computed_here() -> None:
    pair = Pair()
    prompt = list(range(1, 30))
    pair.submit("a", rid="x", prompt=prompt, max_new_tokens=3, to_decode=False)
    for _ in range(5):
        pair.step()
    pair.prefill.flush()
    pair.submit("a", rid="x", prompt=prompt, max_new_tokens=3, to_prefill=False)

    pair.run()

    assert events(pair, "x") == ["claimed", "received"]
    assert pair.decode.scheduler.report(0.0).transfer.received_pages == 0  # type: ignore[union-attr]


def test_a_prompt_that_never_comes_is_computed_here() -> None:
    pair = Pair()
    rid = pair.submit("a", prompt_len=9, to_prefill=False)

    pair.run()

    assert events(pair, rid) == ["claimed", "not received"]


def test_without_fallback_the_request_fails_with_the_reason() -> None:
    pair = Pair(disaggregation_fallback=False)
    rid = pair.submit("a", prompt_len=9, to_prefill=False)
    while pair.decode.answers[rid].finish is None:
        if not pair.step():
            pair.decode.now_s = max(pair.decode.now_s, pair.decode.scheduler.wake_s() or 0.0)

    finish = pair.decode.answers[rid].finish
    assert finish is not None and (finish.kind, finish.status) == (FinishKind.ERROR, 503)
    assert finish.message.startswith(
        "the prompt did not arrive from the prefill engine: no prompt within 120 s"
    )


def test_another_prompt_in_the_room_is_refused() -> None:
    pair = Pair()
    pair.submit("a", rid="x", prompt=list(range(1, 10)), to_prefill=False)
    pair.submit("a", rid="x", prompt=list(range(2, 11)), to_decode=False)

    pair.run()

    assert events(pair, "x") == ["claimed", "not received"]
    assert pair.prefill.scheduler.report(0.0).transfer.failures == {"prompt": 1}  # type: ignore[union-attr]


def test_a_room_that_has_ended_stays_ended() -> None:
    pair = Pair()
    prompt = list(range(1, 10))
    pair.submit("a", prompt=prompt)
    pair.run()
    pair.decode.flush()

    rid = pair.submit("a", rid="again", prompt=prompt)
    pair.run()

    assert events(pair, rid) == ["claimed", "not received"]


def test_a_write_that_fails_ends_the_room() -> None:
    pair = Pair()
    pair.fails_write = lambda command: True
    rid = pair.submit("a", prompt_len=9)

    pair.run()

    assert events(pair, rid) == ["claimed", "not received"]


@pytest.mark.parametrize("steps_before", range(6))
def test_abort_in_each_phase(steps_before: int) -> None:
    pair = Pair(prefill={"chunked_prefill_size": 8})
    rid = pair.submit("a", prompt_len=20, max_new_tokens=4)
    for _ in range(steps_before):
        pair.step()
    pair.decode.abort(rid)
    pair.collect()
    pair.prefill.abort(rid)
    pair.collect()
    finish = pair.decode.answers[rid].finish
    assert finish is not None
    del pair.decode.answers[rid], pair.prefill.answers[rid]

    pair.run()

    assert pair.decode.scheduler.report(0.0).transfer.held_pages == 0  # type: ignore[union-attr]


def test_pages_of_an_aborted_claim_are_not_used_before_the_answer() -> None:
    pair = Pair()
    rid = pair.submit("a", prompt_len=20)
    pair.step(deliver=False)
    pair.decode.abort(rid)
    del pair.decode.answers[rid]
    held = pair.decode.scheduler.report(0.0).transfer
    assert held is not None and held.held_pages == 5

    pair.run()


def test_a_frozen_engine_keeps_its_pages_until_it_answers() -> None:
    pair = Pair()
    rid = pair.submit("a", prompt_len=20)
    pair.step(deliver=False)
    waiting = list(pair.network)
    pair.network.clear()
    pair.tell(pair.decode, PeerLost(PREFILL, "no sign of life for 10 s"))
    pair.collect()
    while pair.decode.answers[rid].finish is None:
        pair.decode.step()
    assert pair.decode.scheduler.report(0.0).transfer.held_pages == 5  # type: ignore[union-attr]

    pair.network.extendleft(reversed(waiting))  # it goes on
    pair.run()

    assert events(pair, rid) == ["claimed", "not received"]


def test_a_dead_prefill_engine_leaves_nothing_behind() -> None:
    pair = Pair()
    rids = [pair.submit(f"room{n}", prompt_len=20) for n in range(3)]
    pair.step(deliver=False)
    pair.lose_prefill()

    while any(pair.decode.answers[rid].finish is None for rid in rids):
        pair.step()
    pair.check()


def test_a_claim_that_the_loss_of_its_engine_has_overtaken_keeps_its_pages() -> None:
    """The link may know of it later than it has told of the loss, and send it to an engine that is back already."""
    pair = Pair()
    pair.submit("a", prompt_len=20)
    pair.step(deliver=False)
    pair.tell(pair.decode, PeerLost(PREFILL, "it has forgotten this engine"))
    assert pair.decode.scheduler.report(0.0).transfer.held_pages == 5  # type: ignore[union-attr]
    pair.run()


def test_a_dead_decode_engine_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.submit("a", prompt_len=20)
    pair.step(deliver=False)
    pair.deliver()  # the claim
    writes = list(pair.network)
    pair.network.clear()
    pair.tell(pair.prefill, PeerLost(DECODE, "no sign of life for 10 s"))
    for write in writes:
        write.make()
    pair.network.clear()
    pair.collect()
    while pair.prefill.step() is not None:
        pair.collect()
    pair.prefill.now_s += 1000.0
    pair.prefill.step()

    pair.prefill.scheduler.on_idle()
    figures = pair.prefill.scheduler.report(0.0).transfer
    assert figures is not None and (figures.open, figures.waiting, figures.held_pages) == (0, 0, 0)


def test_a_room_waits_while_running_requests_need_the_memory() -> None:
    pair = Pair(num_pages=64, max_running_requests=4)
    pair.decode.submit("running", prompt_len=40, max_new_tokens=200)
    pair.step()
    rid = pair.submit("a", prompt_len=60, max_new_tokens=8)

    pair.run()

    assert events(pair, rid)[-1] in ("received", "computed here")


def test_late_and_foreign_messages_are_ignored() -> None:
    pair = Pair()
    pair.submit("a", prompt_len=9)
    pair.run()
    for message in (
        FromPeer(PREFILL, Prefilled("a", 1, 2, b"\1\0\0\0")),
        FromPeer(PREFILL, AbortAck("a", 1)),
        FromPeer(DECODE, Prefilled("b", 7, 2, b"\1\0\0\0")),
        PeerLost("other:1", "gone"),
    ):
        pair.tell(pair.decode, message)
    pair.check()


def test_writes_carry_equal_numbers_of_pages() -> None:
    pair = Pair()
    pair.submit("a", prompt_len=20)
    pair.step(deliver=False)
    pair.deliver()
    commands = [
        each for each in pair.prefill.scheduler.take_transfer_commands() if isinstance(each, WritePages)
    ]
    assert all(len(each.sources) == len(each.targets) for each in commands)
    pair.run()


def test_an_answer_to_an_earlier_claim_of_the_room_is_ignored() -> None:
    pair = Pair()
    prompt = list(range(1, 14))
    pair.submit("a", rid="first", prompt=prompt, to_prefill=False)
    pair.step(deliver=False)
    pair.decode.abort("first")
    del pair.decode.answers["first"]
    pair.collect()
    pair.submit("a", rid="second", prompt=prompt, to_prefill=False)
    pair.step(deliver=False)

    pair.tell(pair.decode, FromPeer(PREFILL, Prefilled("a", 1, 3, b"\7\0\0\0")))

    assert not pair.decode.answers["second"].rows
    pair.submit("a", rid="second", prompt=prompt, to_decode=False)
    pair.run()


def test_running_requests_keep_the_memory_that_they_will_need() -> None:
    pair = Pair(num_pages=32)
    pair.decode.submit("running", prompt_len=40, max_new_tokens=60)  # 25 pages in the end
    pair.decode.step()
    rid = pair.submit("a", prompt_len=44, max_new_tokens=4)
    pair.step()

    assert events(pair, rid) == []  # 21 pages are free, of which it would take 11
    pair.run()
    assert pair.decode.scheduler.report(0.0).totals.retracted_reqs == 0


def test_the_last_request_waits_for_incoming_pages_instead_of_failing() -> None:
    pair = Pair(num_pages=32, admission_estimator="none")
    pair.decode.submit("running", prompt_len=40, max_new_tokens=60)
    pair.decode.step()
    rid = pair.submit("a", prompt_len=60, max_new_tokens=4)
    for _ in range(40):
        pair.step(deliver=False)
    assert events(pair, rid) == ["claimed"]
    assert pair.decode.answers["running"].finish is None

    pair.run()  # both get their answers


def test_bad_kv_leaves_the_cache_with_its_transfer() -> None:
    pair = Pair(prefill={"chunked_prefill_size": 8})
    rid = pair.submit("a", prompt_len=20, max_new_tokens=4)
    for _ in range(2):
        pair.step()
    pair.prefill.runner.fail_next.add(rid)
    while pair.prefill.answers[rid].finish is None:
        pair.step()

    assert pair.prefill.answers[rid].finish.kind is FinishKind.ERROR  # type: ignore[union-attr]
    assert pair.prefill.scheduler.report(0.0).kv.cached_tokens == 0
    pair.run()
    assert events(pair, rid) == ["claimed", "not received"]


def test_a_sibling_that_waits_holds_up_no_other_request() -> None:
    pair = Pair()
    prompt = list(range(1, 12))
    for n in range(2):
        pair.submit(f"a.{n}", rid=f"s{n}", prompt=prompt, message={"group": "g"}, to_prefill=False)
    rid = pair.submit("b", prompt=list(range(40, 60)), to_prefill=False)

    pair.step(deliver=False)

    assert events(pair, rid) == ["claimed"]
    assert events(pair, "s1") == []


def test_urgent_requests_claim_first() -> None:
    pair = Pair(schedule_policy="priority", num_pages=32)
    pair.decode.submit("running", prompt_len=40, max_new_tokens=60)
    pair.decode.step()
    low = pair.submit("a", prompt_len=44, to_prefill=False)
    high = pair.submit("b", prompt_len=9, to_prefill=False, message={"priority": 5})

    pair.step(deliver=False)

    assert (events(pair, low), events(pair, high)) == ([], ["claimed"])
