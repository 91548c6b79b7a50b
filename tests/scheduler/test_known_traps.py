"""Bugs that well-known engines had, each by name: they must not come back here."""

import pytest

from engine.runtime.feasibility import max_new_tokens_for
from engine.runtime.messages import AbortRequest, Call, FinishKind, FlushCache
from engine.scheduler.records.verdict import AddReqResult
from engine.scheduler.requests.req import MAX_OVERTAKEN
from tests.feasible import fits

from .harness import extend_lens


def test_no_batch_is_full_latch(make_scheduler):
    """A latch that nobody clears stops admission for ever although memory is free."""
    harness = make_scheduler(num_pages=16, page_size=4)
    harness.submit("first", prompt_len=20, max_new_tokens=30)
    harness.step()
    waiting = [harness.submit(prompt_len=20, max_new_tokens=30) for _ in range(3)]
    harness.step()
    assert [verdict.result for verdict in harness.last_pass.verdicts] == [AddReqResult.NO_TOKEN] * 3

    harness.abort("first")  # memory is free again, between two steps
    harness.step()

    verdict = harness.last_pass.verdicts[0]
    assert (verdict.rid, verdict.result) == (waiting[0], AddReqResult.CONTINUE)
    harness.run_until_idle()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunked_prefill_size", [-1, 16])
@pytest.mark.parametrize("phases", ["mixed", "prefill-first"])
@pytest.mark.parametrize("radix_cache", [True, False])
def test_whatever_fits_runs(make_scheduler, page_size, chunked_prefill_size, phases, radix_cache):
    """Validation and admission with different sums: a prompt a few tokens under the limit waits for ever."""
    for prompt_len in (1, 15, 16, 17, 100, 126, 127, 128):
        harness = make_scheduler(
            num_pages=128 // page_size,
            page_size=page_size,
            max_model_len=130,
            chunked_prefill_size=chunked_prefill_size,
            phases=phases,
            radix_cache=radix_cache,
            max_prefill_tokens=20,
        )
        most = max_new_tokens_for(prompt_len, harness.capacity)
        assert fits(prompt_len, most, harness.capacity) and not fits(prompt_len, most + 1, harness.capacity)
        for _ in range(2):  # the second finds the first one's pages in the cache
            rid = harness.submit(prompt_len=prompt_len, max_new_tokens=most)
            harness.run_until_idle()
            assert harness.answers[rid].finish.kind is FinishKind.LENGTH


def test_a_cached_prefix_does_not_make_a_fitting_request_unfit(make_scheduler):
    """Its own locked prefix must not be counted as missing memory."""
    harness = make_scheduler(num_pages=16, page_size=4)
    prompt = list(range(1, 50))
    harness.submit(prompt=prompt, max_new_tokens=16)
    harness.run_until_idle()
    assert harness.pages().cached == 16

    rid = harness.submit(prompt=prompt, max_new_tokens=16)
    harness.run_until_idle()

    assert harness.answers[rid].rows[0].usage.cached_tokens == 48


@pytest.mark.parametrize("how", ["abort", "retraction"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_chunk_in_the_prefix_cache_survives_the_end_of_its_request(make_scheduler, how, overlap):
    """A chunk's pages put into the cache and then freed by abort or retraction are garbage for everyone later.

    The FakeRunner sees it when the follower reads them.
    """
    harness = make_scheduler(
        num_pages=24,
        page_size=4,
        chunked_prefill_size=8,
        overlap=overlap,
        schedule_conservativeness=0.01,
        eos=(),
    )
    prompt = list(range(1, 61))
    if how == "retraction":
        harness.submit("grows", prompt_len=4, max_new_tokens=66, ignore_eos=False)
        for _ in range(20):
            harness.step()
    harness.submit("chunked", prompt=prompt, max_new_tokens=5)
    for _ in range(4):
        harness.step()
    if how == "abort":
        harness.abort("chunked")
    follower = harness.submit(prompt=prompt, max_new_tokens=5)
    harness.submit(
        prompt=[90, *prompt[1:30]], max_new_tokens=5
    )  # takes pages that were freed, if any were wrongly
    harness.run_until_idle()

    assert harness.answers[follower].rows[0].usage.cached_tokens > 0
    if how == "retraction":
        assert any("chunked" in record.retracted for record in harness.scheduler.decisions.passes)


def test_prefix_hits_never_cross_namespaces(make_scheduler):
    """Equal tokens of another tenant (cache salt) or under another adapter are not a hit."""
    harness = make_scheduler(page_size=4)
    prompt = list(range(1, 30))
    for extra_key in ("alice", "bob", ""):
        rid = harness.submit(prompt=prompt, max_new_tokens=2, extra_key=extra_key)
        harness.run_until_idle()
        assert harness.answers[rid].rows[-1].usage.cached_tokens == 0

    rid = harness.submit(prompt=prompt, max_new_tokens=2, extra_key="bob")
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.cached_tokens == 28


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_row_reused_while_a_step_is_in_flight_gets_only_its_own_tokens(make_scheduler, overlap):
    """A finished request's surplus step is still in flight when its row has a new tenant."""
    harness = make_scheduler(overlap=overlap, max_running_requests=1, eos=tuple(range(0, 97, 3)))
    rids = [harness.submit(prompt_len=3, max_new_tokens=30, ignore_eos=False) for _ in range(20)]

    steps = harness.run_until_idle()

    assert {req.row for step in steps for req in step.reqs} <= {-1, 0}
    assert sum(harness.answers[rid].finish.kind is FinishKind.STOP for rid in rids) > 10


def test_length_is_foreseen_so_that_no_surplus_step_runs(make_scheduler):
    """Only a stop token can surprise a loop that plans ahead; a length limit cannot."""
    harness = make_scheduler(overlap=1)
    harness.submit(prompt_len=4, max_new_tokens=6)

    assert len(harness.run_until_idle()) == 6


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_an_abort_between_planning_and_settling_is_safe(make_scheduler, overlap):
    """Pages given back while a step in flight writes to them: a later step must not see those writes."""
    harness = make_scheduler(num_pages=16, page_size=4, chunked_prefill_size=16, overlap=overlap)
    for k in range(30):
        rid = harness.submit(prompt_len=40, max_new_tokens=8)
        for _ in range(1 + k % 4):
            harness.step()
        batch = harness.scheduler.next_batch(harness.now_s)
        if batch is not None:
            harness.in_flight.append((batch, harness.runner.launch(batch.plan)))
        harness.abort(rid)
        assert harness.answers[rid].finish.kind in (FinishKind.ABORT, FinishKind.LENGTH)
        harness.submit(prompt_len=20, max_new_tokens=3)  # wants the same pages at once
        while harness.in_flight:
            harness.settle()
    harness.run_until_idle()


def test_what_a_step_in_flight_computes_is_not_in_the_prefix_cache(make_scheduler):
    """Its last token is not known yet: pages under a wrong key would be garbage for whoever matches it."""
    harness = make_scheduler(page_size=1, overlap=2)
    rid = harness.submit(prompt_len=5, max_new_tokens=20)
    for _ in range(6):
        harness.step()
    assert len(harness.in_flight) == 2
    known = 5 + len(harness.answers[rid].tokens)

    harness.abort(rid)

    assert harness.pages().cached == known - 1
    harness.run_until_idle()


def test_an_abort_is_not_lost_between_two_chunks(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=8, page_size=4)
    rid = harness.submit(prompt_len=60, max_new_tokens=5)
    harness.step()

    harness.abort(rid)

    assert harness.answers[rid].finish.kind is FinishKind.ABORT
    assert harness.run_until_idle() == []


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("chunked_prefill_size", [-1, 4, 8, 16, 64])
def test_one_failing_request_does_not_poison_the_prefix_cache(make_scheduler, chunked_prefill_size, overlap):
    """KV that gave logits that are not finite is not kept, in whatever step it was computed."""
    harness = make_scheduler(page_size=4, chunked_prefill_size=chunked_prefill_size, overlap=overlap)
    prompt = list(range(1, 21))
    rid = harness.submit(prompt=prompt, max_new_tokens=5)
    harness.runner.fail_next.add(rid)
    harness.run_until_idle()

    assert harness.answers[rid].finish.kind is FinishKind.ERROR
    assert harness.pages().cached == 0
    again = harness.submit(prompt=prompt, max_new_tokens=2)
    harness.run_until_idle()
    assert harness.answers[again].rows[0].usage.cached_tokens == 0


def test_a_failing_request_takes_nothing_from_others(make_scheduler):
    harness = make_scheduler(page_size=4)
    prompt = list(range(1, 21))
    harness.submit("good", prompt=prompt, max_new_tokens=9)
    harness.step()
    harness.submit("bad", prompt=[*prompt[:12], *range(50, 60)], max_new_tokens=9)
    harness.runner.fail_next.add("bad")
    harness.run_until_idle()  # the good one reads its pages to its end

    assert harness.answers["bad"].rows[-1].usage.cached_tokens == 12
    assert harness.pages().cached == 7  # 28 tokens of the good one, none of the bad one


def test_a_flush_while_requests_run_takes_nothing_from_them(make_scheduler):
    harness = make_scheduler(page_size=4, overlap=1, num_pages=32)
    prompt = list(range(1, 41))
    for k in range(1, 7):
        harness.submit(prompt=[*prompt, 50 + k], max_new_tokens=12)
        harness.step()
        harness.scheduler.handle(Call(k, FlushCache()), harness.now_s)
        harness.scheduler.handle(AbortRequest("nobody", ""), harness.now_s)
        harness.collect()
    harness.run_until_idle()
    assert len(harness.flushes) == 6


def test_many_running_requests_do_not_keep_prompts_out(make_scheduler):
    """Decodes that ride along must not take the whole chunk budget."""
    harness = make_scheduler(chunked_prefill_size=8, page_size=4, max_running_requests=32, num_pages=512)
    for _ in range(12):
        harness.submit(prompt_len=2, max_new_tokens=100)
    for _ in range(8):
        harness.step()
    running = harness.scheduler.report(0.0).num_running_reqs
    assert running > 8

    rid = harness.submit(prompt_len=20, max_new_tokens=2)
    for _ in range(20):
        harness.step()

    assert harness.answers[rid].rows
    harness.run_until_idle()


def test_a_retracted_request_does_not_change_its_answer(make_scheduler):
    harness = make_scheduler(num_pages=16, page_size=4, schedule_conservativeness=0.01, eos=())
    rids = []
    for _ in range(6):
        rids.append(harness.submit(prompt_len=6, max_new_tokens=30, ignore_eos=False))
        harness.step()
    harness.run_until_idle()  # compares every answer with the one it gets alone

    assert max(harness.answers[rid].rows[-1].usage.num_retractions for rid in rids) > 0


def test_a_continuing_chunk_progresses_while_a_page_can_be_had(make_scheduler):
    harness = make_scheduler(num_pages=64, page_size=4, chunked_prefill_size=8)
    harness.submit("decodes", prompt_len=4, max_new_tokens=100)
    harness.step()
    harness.submit("chunked", prompt_len=50, max_new_tokens=2)

    lengths = []
    while not harness.answers["chunked"].rows:
        lengths.append(extend_lens(harness.step()))

    assert lengths == [[4]] * 11 + [[6]]  # eight, less a decode, in whole pages
    harness.run_until_idle()


def test_a_prompt_in_its_chunks_is_not_starved_by_those_behind_it(make_scheduler):
    """What it still has to compute must be counted: else others take that memory, and it is the first victim."""
    harness = make_scheduler(
        page_size=16,
        num_pages=128,
        max_model_len=2040,
        max_running_requests=200,
        eos=(),
        chunked_prefill_size=64,
    )
    harness.submit("warm", prompt_len=5, max_new_tokens=40, ignore_eos=False)
    harness.step()
    harness.step()
    harness.submit("long", prompt_len=1700, max_new_tokens=20, ignore_eos=False)

    num_steps = 0
    while not harness.answers["long"].rows:
        while harness.scheduler.report(0.0).num_queue_reqs < 8:
            harness.submit(prompt_len=5, max_new_tokens=120, ignore_eos=False)
        harness.step()
        num_steps += 1
        assert num_steps <= 2 * 1700 / 48, (
            "it computes a chunk in each step, 48 tokens beside the decodes at least"
        )

    assert harness.answers["long"].rows[0].usage.num_retractions == 0


def test_a_retraction_does_not_make_a_request_young_again(make_scheduler):
    """Whoever was overtaken until its turn came is not overtaken as often again because it lost its memory."""
    harness = make_scheduler(num_pages=16, page_size=4, schedule_conservativeness=0.01, eos=())
    harness.submit("a", prompt_len=8, max_new_tokens=48, ignore_eos=False)
    harness.step()
    harness.submit("b", prompt_len=12, max_new_tokens=30, ignore_eos=False)
    req = harness.scheduler._parts.requests.by_id["b"]
    req.num_overtaken = MAX_OVERTAKEN
    while not req.num_retractions:
        harness.step()
    while req.row < 0:
        harness.step()

    assert req.num_overtaken >= MAX_OVERTAKEN
    harness.run_until_idle()
