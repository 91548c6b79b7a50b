"""Requests that leave the device and come back, and siblings that start from a copy: the tokens they would have had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode

NUM = 16
PROMPT = [(7 * n * n + 3 * n) % 96 for n in range(37)]
GREEDY = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=1234, max_new_tokens=64)
PENALISED = SamplingParams(
    temperature=0.7,
    top_k=40,
    seed=77,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=0.25,
    max_new_tokens=64,
)
MIN_TOKENS = SamplingParams(
    temperature=0.0, seed=0, max_new_tokens=64, min_new_tokens=11, logit_bias={2: 60.0}
)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalized": PENALISED, "min_tokens": MIN_TOKENS}


@pytest.fixture(params=list(KINDS))
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return KINDS[request.param]


@pytest.fixture
def make_swapping(make_driver: Callable[..., Any], make_tiny_llama: Callable[..., Any]) -> Callable[..., Any]:
    """A driver of a tiny model with poisoned memory, also on the host."""
    tiny = make_tiny_llama()

    def make(page_size: int = 4, **options: Any) -> Any:
        return make_driver(tiny.spec, tiny.folder, page_size=page_size, num_host_pages=64, **options)

    return make


def run(driver: Any, req: Any, num: int = NUM) -> list[int]:
    while len(req.output) < num:
        driver.step([(req, len(req.tokens) - req.computed)])
    output: list[int] = req.output
    return output


def swap_out(driver: Any, req: Any, host_pages: list[int]) -> list[tuple[int, int]]:
    """End the request's row and free its pages; what the next plan must copy to the host."""
    copies = [*zip(req.pages, host_pages, strict=True)]
    driver.finish(req)
    return copies


def swap_in(driver: Any, old: Any, host_pages: list[int]) -> tuple[Any, list[tuple[int, int]]]:
    """The request once more, with all but its last token in its prefix; what the next plan must copy back."""
    req = driver.start(old.tokens, old.sampling, prompt_len=old.prompt_len)
    req.computed = req.prefix_len = old.computed
    req.pages = [driver.pages.pop(0) for _ in host_pages]
    return req, [*zip(host_pages, req.pages, strict=True)]


def poison(driver: Any, pages: list[int]) -> None:
    for view in driver.runner.kv_pool.page_views:
        view[pages] = torch.nan


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_before", [1, 6])
def test_a_swapped_request_goes_on_as_if_nothing_had_happened(make_swapping, sampling, page_size, num_before):
    driver = make_swapping(page_size)
    alone = driver.generate([PROMPT], sampling, num=NUM)[0]
    req = driver.start(PROMPT, sampling)
    run(driver, req, num_before)
    host_pages = driver.random.sample(range(64), len(req.pages))

    pages = list(req.pages)
    result = driver.step([], swap_outs=swap_out(driver, req, host_pages))
    assert result.swap_s > 0.0
    poison(driver, pages)
    again, swap_ins = swap_in(driver, req, host_pages)
    result = driver.step([(again, 1)], swap_ins=swap_ins)

    assert 0.0 < result.swap_s <= result.forward_s
    assert again.output[: num_before + 1] == alone[: num_before + 1]
    assert run(driver, again) == alone
    assert driver.step([(again, 1)]).swap_s == 0.0


@pytest.mark.fast_cases(2)
def test_several_come_back_in_a_step_with_others(make_swapping, sampling):
    driver = make_swapping()
    prompts = [PROMPT, PROMPT[:10], PROMPT[3:30]]
    alone = [driver.generate([prompt], sampling, num=NUM)[0] for prompt in prompts]
    reqs = [driver.start(prompt, sampling) for prompt in prompts]
    for req in reqs:
        run(driver, req, 5)
    host = [list(range(20)), list(range(30, 50))]
    host = [ids[: len(req.pages)] for ids, req in zip(host, reqs, strict=False)]
    outs = [copy for req, ids in zip(reqs[:2], host, strict=True) for copy in swap_out(driver, req, ids)]
    driver.step([(reqs[2], 1)], swap_outs=outs)
    poison(driver, [page for page, _ in outs])
    back = [swap_in(driver, req, ids) for req, ids in zip(reqs[:2], host, strict=True)]
    reqs[:2] = [req for req, _ in back]
    newcomer = driver.start(PROMPT[::-1], GREEDY)

    driver.step(
        [(newcomer, 37), *((req, 1) for req in reqs)], swap_ins=[pair for _, ins in back for pair in ins]
    )

    assert [run(driver, req) for req in reqs] == alone


def test_pages_that_are_swapped_out_may_be_written_in_the_same_step(make_swapping, sampling):
    """The newcomer takes the row and the pages of the one that leaves, as if they had been free for long."""
    driver = make_swapping()
    alone = driver.generate([PROMPT], sampling, num=NUM)[0]
    other = driver.generate([PROMPT[::-1]], num=3)[0]
    req = driver.start(PROMPT, sampling)
    run(driver, req, 4)
    kept = [view[req.pages].clone() for view in driver.runner.kv_pool.page_views]
    host_pages = list(range(5, 5 + len(req.pages)))
    outs = swap_out(driver, req, host_pages)
    driver.rows = [req.row, *driver.rows[:-1]]
    newcomer = driver.start(PROMPT[::-1], GREEDY)
    newcomer.pages = list(req.pages)

    driver.step([(newcomer, 37)], swap_outs=outs)

    for n, before in enumerate(kept):
        there = driver.runner.host_kv_pool.pages[0][host_pages, n]
        computed = req.computed
        torch.testing.assert_close(there.flatten(0, 1)[:computed], before.flatten(0, 1)[:computed])
    assert run(driver, newcomer, 3) == other
    driver.finish(newcomer, free=False)
    again, swap_ins = swap_in(driver, req, host_pages)
    driver.step([(again, 1)], swap_ins=swap_ins)
    assert run(driver, again) == alone


def test_a_plan_may_hold_nothing_but_swaps(make_swapping):
    driver = make_swapping()
    req = driver.start(PROMPT)
    run(driver, req, 2)
    host_pages = list(range(len(req.pages)))
    plan = driver.plan([], swap_outs=swap_out(driver, req, host_pages))
    assert (plan.mode, plan.total_num_scheduled_tokens) == (ForwardMode.IDLE, 0)
    result = driver.runner.launch(plan).wait()
    assert (result.step_id, result.next_token_ids, result.errors) == (plan.step_id, b"", {})
    assert 0.0 < result.swap_s <= result.forward_s
    assert not driver.runner.host_kv_pool.pages[0][host_pages, :, 0].isnan().any()


@pytest.mark.parametrize("swaps", ["swap_outs", "swap_ins"])
def test_swapping_without_memory_on_the_host_is_a_bug(driver, swaps):
    with pytest.raises(AssertionError, match="the plan swaps pages, but there is no KV memory on the host"):
        driver.step([], **{swaps: [(1, 0)]})


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("prompt_len", [34, 35, 36])
@pytest.mark.parametrize("donor_output", [0, 1, 6])
def test_siblings_start_from_a_copy_of_the_page_that_holds_the_end_of_the_prompt(
    driver, prompt_len, donor_output
):
    """Each writes its own tokens into that page, whatever the donor has written there before."""
    prompt = PROMPT[:prompt_len]
    params = [replace(PENALISED, seed=seed) for seed in range(3)]
    alone = (
        driver.generate([prompt], params[0], num=NUM)[0],
        *driver.generate([prompt] * 2, params[1:], num=NUM),
    )
    donor = driver.start(prompt, params[0])
    driver.step([(donor, prompt_len)])
    run(driver, donor, 1 + donor_output)
    siblings, page_copies = [], []
    whole = (prompt_len - 1) // 4
    for one in params[1:]:
        sibling = driver.start(prompt, one)
        copy = driver.pages.pop(0)
        sibling.pages = [*donor.pages[:whole], copy]
        sibling.computed = sibling.prefix_len = prompt_len - 1
        page_copies.append((donor.pages[whole], copy))
        siblings.append(sibling)

    driver.step([*((sibling, 1) for sibling in siblings), (donor, 1)], page_copies=page_copies)

    while len(siblings[0].output) < NUM:
        driver.step([(req, 1) for req in (donor, *siblings)])
    assert (donor.output[:NUM], *(sibling.output for sibling in siblings)) == alone
    assert len({tuple(output) for output in alone}) == 3


def test_the_order_of_swaps_and_copies(make_swapping):
    """Out, then copies, then in: a page may be the source of the first two and come back in the third."""
    driver = make_swapping()
    views = driver.runner.kv_pool.page_views
    for view in views:
        view.copy_(torch.arange(view.shape[0], dtype=view.dtype)[:, None, None, None].expand_as(view))

    driver.step([], swap_outs=[(3, 9), (5, 2)], page_copies=[(3, 5)], swap_ins=[(9, 7), (2, 3)])

    for view in views:
        assert np.unique(view[5].numpy()).tolist() == [3.0]
        assert np.unique(view[7].numpy()).tolist() == [3.0]
        assert np.unique(view[3].numpy()).tolist() == [5.0]
