"""Pooling requests in the scheduler: one row with a vector, through the same queue and memory as generations."""

from __future__ import annotations

import pytest
from msgspec import structs

from engine.runtime.messages import FinishKind
from engine.runtime.pooling import PoolingKind, PoolingParams
from engine.scheduler.prefix_cache.radix_node import nodes_of
from engine.scheduler.records.decision_log import vector_digest

from .fake_runner import expected_vector, ints
from .harness import Pages, extend_lens

LAST = PoolingParams()
MEAN = PoolingParams(all_tokens=True)
PROMPT = list(range(1, 21))


def test_a_vector_answers_a_prompt_and_its_pages_stay_cached(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=8, page_size=4, num_pages=16)
    rid = harness.submit(prompt=PROMPT, pooling=LAST)

    steps = harness.run_until_idle()

    assert [extend_lens(step) for step in steps] == [[8], [8], [4]]
    assert [step.plan.pools for step in steps] == [b"", b"", b"\1"]
    assert [step.plan.samples for step in steps] == [b"\0"] * 3
    (row,) = harness.answers[rid].rows
    assert row.vector == expected_vector(PROMPT) and row.finish.kind is FinishKind.STOP
    assert (row.usage.prompt_tokens, row.usage.completion_tokens) == (20, 0)
    assert harness.pages() == Pages(free=11, cached=5, held=0)


def test_the_last_token_takes_the_rest_of_its_prompt_from_the_cache_and_a_mean_does_not(make_scheduler):
    harness = make_scheduler(page_size=4)
    for pooling in (LAST, LAST, MEAN, PoolingParams(PoolingKind.LABELS, label_ids=(5, 6))):
        harness.submit(prompt=PROMPT, pooling=pooling)
        harness.run_until_idle()

    cached = [answer.rows[-1].usage.cached_tokens for answer in harness.answers.values()]
    assert cached == [0, 16, 0, 16]


def test_texts_to_embed_do_not_evict_a_conversation(make_scheduler):
    harness = make_scheduler(page_size=4, num_pages=20)
    harness.submit(prompt=PROMPT, max_new_tokens=1)
    harness.run_until_idle()
    for number in range(50):
        harness.submit(prompt=[100 + number] * 20, pooling=LAST)
        harness.run_until_idle()
    turn = harness.submit(prompt=[*PROMPT, 9], max_new_tokens=1)
    harness.run_until_idle()

    assert harness.answers[turn].rows[-1].usage.cached_tokens == 20


def test_requests_with_the_same_beginning_wait_for_it_only_if_they_can_use_it(make_scheduler):
    harness = make_scheduler(page_size=4, chunked_prefill_size=256)
    prompts = [[*range(1, 41), 50 + n] for n in range(3)]
    for prompt, pooling in zip(prompts, (LAST, LAST, MEAN), strict=True):
        harness.submit(prompt=prompt, pooling=pooling)

    steps = harness.run_until_idle()

    assert [extend_lens(step) for step in steps] == [[41, 41], [1]]


def test_a_prompt_may_fill_the_context_and_the_pool(make_scheduler):
    harness = make_scheduler(page_size=4, num_pages=8, max_model_len=32)
    fits, too_long = harness.submit(prompt_len=32, pooling=LAST), harness.submit(prompt_len=33, pooling=LAST)
    harness.run_until_idle()

    assert harness.answers[fits].finish.kind is FinishKind.STOP
    assert "33 tokens" in harness.answers[too_long].finish.message

    harness = make_scheduler(page_size=4, num_pages=4, max_model_len=32)
    fits, too_long = harness.submit(prompt_len=16, pooling=LAST), harness.submit(prompt_len=17, pooling=LAST)
    harness.run_until_idle()
    assert harness.answers[fits].finish.kind is FinishKind.STOP
    assert "KV pool holds 16" in harness.answers[too_long].finish.message


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_vectors_and_generations_share_steps(make_scheduler, overlap):
    harness = make_scheduler(overlap=overlap)
    harness.submit("text", max_new_tokens=8)
    harness.step()
    for n in range(5):
        harness.submit(f"v{n}", prompt_len=7 + n, pooling=MEAN if n % 2 else LAST)

    steps = harness.run_until_idle()

    mixed = [step for step in steps if step.plan.pools]
    assert any(len(ints(step.plan.rows)) > step.num_extends for step in mixed), (
        "none had a decode beside vectors"
    )
    assert all(len(step.sampled) == len(step.reqs) - step.plan.pools.count(1) for step in mixed)


def test_a_mean_that_loses_its_memory_is_computed_again_from_its_first_token(make_scheduler):
    """With --preemption-mode swap, too: what the swapped tokens had added to the mean would be lost."""
    harness = make_scheduler(
        page_size=4,
        num_pages=64,
        num_host_pages=64,
        preemption_mode="swap",
        chaos="retract=0.5:3",  # not in the first pass, before a token is computed
        chunked_prefill_size=8,
        overlap=1,
    )
    harness.submit("mean", prompt_len=40, pooling=MEAN)

    harness.run_until_idle()

    assert harness.answers["mean"].rows[-1].usage.num_retractions > 0, "the test needs a retraction"
    assert harness.scheduler.report(0.0).totals.swapped_out_tokens == 0


def test_a_result_that_takes_too_long_is_no_matter_of_max_tokens(make_scheduler):
    harness = make_scheduler(request_timeout=0.1, chunked_prefill_size=1)
    harness.submit("slow", prompt_len=100, pooling=LAST)

    harness.run_until_idle()

    finish = harness.answers["slow"].finish
    assert (finish.kind, finish.status) == (FinishKind.ERROR, 504)
    assert "its result was not ready, the limit is 0.1 s; send fewer inputs" in finish.message


def test_an_abort_answers_a_request_whose_vector_is_on_its_way(make_scheduler):
    harness = make_scheduler(overlap=1)
    for n in range(3):
        harness.submit(f"v{n}", pooling=LAST)
    harness.step()

    harness.abort("v1")
    harness.run_until_idle()

    kinds = [[row.finish.kind for row in harness.answers[f"v{n}"].rows] for n in range(3)]
    assert kinds == [[FinishKind.STOP], [FinishKind.ABORT], [FinishKind.STOP]]


def test_the_checksum_of_a_step_covers_its_results(make_scheduler):
    harness = make_scheduler()
    harness.submit(pooling=LAST)
    [batch] = harness.run_until_idle()

    without = structs.replace(batch, plan=structs.replace(batch.plan, pools=b""))

    assert batch.plan.pools and batch.checksum() != without.checksum()


def test_a_replay_has_the_digest_of_a_vector_in_place_of_the_vector():
    vector = expected_vector(PROMPT)
    digest = vector_digest(vector)
    assert digest != vector and vector_digest(digest) == digest
    assert vector_digest(expected_vector(PROMPT[1:])) != digest


def test_a_vector_that_fails_fails_alone(make_scheduler):
    harness = make_scheduler()
    for n in range(3):
        harness.submit(f"v{n}", pooling=LAST)
    harness.runner.fail_next.add("v1")

    harness.run_until_idle()

    kinds = [harness.answers[f"v{n}"].finish.kind for n in range(3)]
    assert kinds == [FinishKind.STOP, FinishKind.ERROR, FinishKind.STOP]


STATE = [1 + (k + 30) % 90 for k in range(64)]
QUESTIONS = [[*STATE, 91, 92, number] for number in range(1, 9)]


def ask(harness, prompts, shared_len=64):
    pooling = PoolingParams(PoolingKind.LABELS, label_ids=(5, 6), shared_len=shared_len)
    return [harness.submit(prompt=prompt, pooling=pooling) for prompt in prompts]


def evict(harness, num_pages):
    supply = harness.scheduler._parts.memory.kv._supply
    supply.give_back(harness.prefix_cache.evict(num_pages))
    harness.scheduler.audit()


def test_the_input_of_questions_is_computed_once_and_kept_for_the_next_call(make_scheduler):
    """Their own pages go first afterwards, before a conversation, and before the input."""
    harness = make_scheduler(
        page_size=4, num_pages=64, max_model_len=160, chunked_prefill_size=256, max_running_requests=16
    )
    harness.submit(prompt=PROMPT, max_new_tokens=1)
    harness.run_until_idle()
    ask(harness, [[*question, *PROMPT[:8]] for question in QUESTIONS])
    steps = harness.run_until_idle()
    assert [extend_lens(step) for step in steps] == [[75], [11] * 7]
    assert harness.pages() == Pages(free=64 - 5 - 16 - 8 * 2, cached=5 + 16 + 8 * 2, held=0)
    evict(harness, 16)

    again = ask(harness, QUESTIONS[:1])[0]
    turn = harness.submit(prompt=[*PROMPT, 9], max_new_tokens=1)
    harness.run_until_idle()

    assert [harness.answers[rid].rows[-1].usage.cached_tokens for rid in (again, turn)] == [64, 20]


def test_the_input_is_wanted_from_its_first_question_to_its_last(make_scheduler):
    """Between the first two no request leases it; without the group all of it would go before the conversation."""
    harness = make_scheduler(page_size=4, num_pages=40, max_model_len=160, max_running_requests=1)
    harness.submit(prompt=PROMPT, max_new_tokens=1)
    harness.run_until_idle()
    rids = ask(harness, QUESTIONS[:3])
    while not harness.answers[rids[0]].finish:
        harness.step()
    assert harness.pages().held == 0

    evict(harness, 5)  # the conversation
    harness.run_until_idle()

    assert [harness.answers[rid].rows[-1].usage.cached_tokens for rid in rids] == [0, 64, 64]
    assert not any(node.num_wants for node in nodes_of(harness.prefix_cache._roots))


@pytest.mark.parametrize("how", ["abort", "fail", "refuse"])
def test_a_group_ends_however_its_members_end(make_scheduler, how):
    harness = make_scheduler(page_size=4, num_pages=40, max_model_len=100, max_running_requests=1)
    rids = ask(harness, [*QUESTIONS[:2], [*STATE, *PROMPT, *PROMPT]])
    assert harness.answers[rids[2]].finish  # too long
    if how == "fail":
        harness.runner.fail_next.update(rids)
    if how == "abort":
        for rid in rids[:2]:
            harness.abort(rid)
    harness.run_until_idle()

    assert all(harness.answers[rid].finish for rid in rids)
    assert not len(harness.scheduler._parts.memory.kv.label_groups)
