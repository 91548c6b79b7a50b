"""Evicted pages that come back from host memory: `--kv-host-size`.

The FakeRunner's KV is a hash of all tokens before, so a page that comes back wrong is seen at the first step that reads
it; the harness compares every answer with the one the request gets alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.scheduler.queries.why import explain
from engine.scheduler.records.verdict import Reason
from tests.scheduler.harness import VOCAB_SIZE, Harness, extend_lens


def make(num_pages: int = 16, num_host_pages: int = 64, **settings: Any) -> Harness:
    cache = {"kv_host_size": 1.0, **settings.pop("cache", {})}
    return Harness(num_pages=num_pages, num_host_pages=num_host_pages, cache=cache, **settings)


def prompt_of(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def run(harness: Harness, prompt: list[int], **message: Any) -> tuple[int, int, list[int]]:
    """Cached tokens, those of the host, and the lengths of the chunks of a request."""
    rid = harness.submit(prompt=prompt, max_new_tokens=2, **message)
    steps = harness.run_until_idle()
    usage = harness.answers[rid].rows[-1].usage
    return usage.cached_tokens, usage.host_tokens, [length for step in steps for length in extend_lens(step)]


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_evicted_prompt_comes_back_from_the_host(overlap: int) -> None:
    harness = make(overlap=overlap)
    first = prompt_of(1)
    assert run(harness, first) == (0, 0, [40])
    assert run(harness, prompt_of(2)) == (0, 0, [40])
    assert run(harness, first) == (36, 16, [4]), "its first five pages were still in the KV pool"
    totals = harness.scheduler.report(0.0).totals
    assert (totals.cached_tokens, totals.prompt_host_tokens, totals.prompt_tier_tokens) == (36, 16, 0)
    figures = harness.scheduler.report(0.0).tiers["host"]
    assert (figures.lookups, figures.loaded_tokens, figures.loaded_bytes) == (3, 16, 16 * 1024)
    assert figures.used_bytes == figures.stored_bytes >= figures.loaded_bytes
    assert "disk" not in harness.scheduler.report(0.0).tiers
    sentence = explain(harness.scheduler.decisions, "r2").sentence
    assert "found 20 of 40 prompt tokens in the cache (" in sentence
    assert "), and 16 in host memory" in sentence


def test_each_row_of_an_answer_says_what_the_host_had() -> None:
    harness = make()
    for seed in (1, 2):
        run(harness, prompt_of(seed))
    rid = harness.submit(prompt=prompt_of(1), max_new_tokens=5)
    harness.run_until_idle()
    assert [row.usage.host_tokens for row in harness.answers[rid].rows] == [16] * 5


def test_without_it_the_prompt_is_computed() -> None:
    harness = make(cache={"kv_host_size": 0.0})
    run(harness, prompt_of(1))
    run(harness, prompt_of(2))
    cached, on_host, _ = run(harness, prompt_of(1))
    assert on_host == 0 and cached < 36 and not harness.scheduler.report(0.0).tiers


def test_other_salts_and_adapters_do_not_find_it() -> None:
    harness = make()
    run(harness, prompt_of(1), extra_key="one")
    run(harness, prompt_of(2))
    run(harness, prompt_of(3))
    assert run(harness, prompt_of(1), extra_key="other")[0] == 0
    assert run(harness, prompt_of(1))[0] == 0
    assert run(harness, prompt_of(1), extra_key="one")[1] > 0


def test_pages_that_a_tier_writes_to_at_once_are_evicted_without_a_copy() -> None:
    harness = make()
    run(harness, prompt_of(1))
    parts = harness.scheduler._parts
    incoming, host = parts.ledger._incoming, parts.memory.host
    pages = incoming.take(parts.memory.kv.available_pages)
    assert len(pages) == 16 and not host.has_outs and not host.num_cached
    incoming.give_back(pages)
    assert run(harness, prompt_of(1)) == (0, 0, [40])


def test_a_page_that_came_back_is_not_copied_out_again() -> None:
    harness = make()
    for _ in range(3):
        for seed in range(4):
            run(harness, prompt_of(seed))
    copied = harness.scheduler.report(0.0).tiers["host"].stored_bytes
    assert copied <= 4 * 11 * 4 * 1024, "4 prompts, each of 10 pages and one for the answer"


def test_what_ends_with_its_request_is_not_kept() -> None:
    harness = make()
    run(harness, prompt_of(1), message={"keep_s": 0.0})
    run(harness, prompt_of(2))
    assert run(harness, prompt_of(1))[1] == 0


def test_a_flush_names_the_host_or_leaves_it() -> None:
    harness = make()
    first = prompt_of(1)
    run(harness, first)
    for seed in (2, 3):
        run(harness, prompt_of(seed))
    harness.flush(host=False)
    assert run(harness, first)[1] > 0
    run(harness, prompt_of(2))
    harness.flush(device=False)
    assert harness.scheduler.report(0.0).tiers["host"].used_bytes == 0
    run(harness, prompt_of(3))
    harness.flush()
    assert run(harness, first)[0] == 0


def test_bad_kv_is_not_kept_on_the_host() -> None:
    """A request that fails by values that are not finite takes its pages out of both."""
    harness = make()
    first = prompt_of(1)
    run(harness, first)
    for seed in (2, 3):
        run(harness, prompt_of(seed))
    harness.runner.fail_next.add(rid := f"r{len(harness.answers)}")
    harness.submit(rid, prompt=first, max_new_tokens=2)
    harness.run_until_idle()
    assert run(harness, first) == (0, 0, [40])


def test_a_request_that_needs_all_tokens_computes_them() -> None:
    harness = make()
    for seed in (1, 2, 3):
        run(harness, prompt_of(seed))
    rid = harness.submit(prompt=prompt_of(1), max_new_tokens=2, prompt_logprobs=0)
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.cached_tokens == 0
    run(harness, prompt_of(2))
    run(harness, prompt_of(3))
    assert run(harness, prompt_of(1))[1] == 36, "the host had all of it"


def test_a_prompt_waits_for_a_step_that_copies_less() -> None:
    """With KV of 1 GiB a token a step copies 16 pages, or those of one request."""
    harness = make(num_pages=60, num_host_pages=200, kv_token_bytes=1 << 30, max_model_len=200)
    prompts = [prompt_of(seed, 60) for seed in range(4)]
    for prompt in prompts:
        run(harness, prompt)
    for seed in range(10, 17):
        run(harness, prompt_of(seed, 40))
    for prompt in prompts[:2]:
        harness.submit(prompt=prompt, max_new_tokens=2)
    harness.step()
    reasons = [verdict.reason for verdict in harness.last_pass.verdicts]
    assert reasons == [Reason.ADMITTED_ALONE, Reason.COPY_BUDGET], harness.last_pass.verdicts
    harness.step()
    assert harness.last_pass.verdicts[0].reason is Reason.ADMITTED
    harness.run_until_idle()


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("page_size", "num_host_pages", "mode"),
    [(1, 400, "swap"), (4, 8, "swap"), (4, 100, "cost"), (16, 40, "swap")],
)
def test_prompts_through_a_small_pool_and_the_host_get_the_tokens_that_they_get_alone(
    page_size: int, num_host_pages: int, mode: str, overlap: int
) -> None:
    rng = random.Random(page_size)
    harness = make(
        num_pages=160 // page_size,
        num_host_pages=num_host_pages,
        page_size=page_size,
        max_model_len=96,
        max_running_requests=4,
        overlap=overlap,
        chunked_prefill_size=16,
        preemption_mode=mode,
        schedule_conservativeness=0.01,
    )
    common = prompt_of(0, 50)
    prompts = [common[: rng.randrange(50)] + prompt_of(seed, rng.randrange(1, 30)) for seed in range(10)]
    for prompt in prompts * 5:
        harness.submit(prompt=prompt, max_new_tokens=rng.randrange(1, 16), ignore_eos=False)
        for _ in range(rng.randrange(6)):
            harness.step()
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).tiers["host"].loaded_tokens, "nothing came back: nothing is tested"
