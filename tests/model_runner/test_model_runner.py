"""What the StepPlan contract promises: the same tokens however a request is batched, cut, cached or restarted."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, RowUpdate, StepPlan

NUM = 16
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
GREEDY = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalized": PENALISED}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(96) for _ in range(length)]


@pytest.fixture(params=list(KINDS))
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return KINDS[request.param]


@pytest.fixture
def alone(driver, sampling):
    """What the request gives when nothing else runs."""
    return driver.generate([prompt_of(37)], sampling, num=NUM)[0]


@pytest.mark.fast_cases(1)
def test_among_32_others(driver, sampling, alone):
    prompts = [prompt_of(3 + n, seed=n + 1) for n in range(31)]
    others = [replace(list(KINDS.values())[n % 3], seed=n) for n in range(31)]
    outputs = driver.generate(
        [*prompts[:15], prompt_of(37), *prompts[15:]], [*others[:15], sampling, *others[15:]], num=NUM
    )
    assert outputs[15] == alone


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("chunk", [1, 4, 7, 36])
def test_chunked(driver, sampling, alone, chunk):
    assert driver.generate([prompt_of(37)], sampling, num=NUM, chunk=chunk)[0] == alone


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("prefix_len", [4, 20, 36])
def test_with_a_cached_prefix(driver, sampling, alone, prefix_len):
    donor = driver.start([*prompt_of(37)[:36], 5], GREEDY)
    driver.step([(donor, 37)])
    driver.finish(donor, free=False)
    req = driver.start(prompt_of(37), sampling, prefix=(donor, prefix_len))
    while len(req.output) < NUM:
        driver.step([(req, len(req.tokens) - req.computed)])
    assert req.output == alone


def test_mixed_with_prefill_chunks(driver, sampling, alone):
    req = driver.start(prompt_of(37), sampling)
    driver.step([(req, 37)])
    while len(req.output) < NUM:
        newcomer = driver.start(prompt_of(30, seed=len(req.output)), GREEDY)
        driver.step([(newcomer, 20), (req, 1)])
        driver.step([(newcomer, 10), (req, 1)])
        driver.finish(newcomer)
    assert req.output[:NUM] == alone


def test_after_retraction(driver, sampling, alone):
    req = driver.start(prompt_of(37), sampling)
    while len(req.output) < 7:
        driver.step([(req, len(req.tokens) - req.computed)])
    driver.finish(req)
    again = driver.start(req.tokens, sampling, prompt_len=37)
    while len(again.output) < NUM:
        driver.step([(again, min(20, len(again.tokens) - again.computed))])
    assert again.output == alone


def test_launched_before_the_tokens_are_known(driver, sampling, alone):
    """Overlap: the plan of the next step is made while the host has not seen the last token."""
    req = driver.start(prompt_of(37), sampling)
    pending = [driver.runner.launch(driver.plan([(req, 37)]))]
    req.computed = 37
    for _ in range(NUM - 1):
        req.tokens.append(-1)  # there is one, but nobody on the host knows which
        pending.append(driver.runner.launch(driver.plan([(req, 1)])))
        req.computed += 1
    tokens = [np.frombuffer(step.wait().next_token_ids, dtype=np.int32)[0] for step in pending]
    assert tokens == alone


def test_a_row_is_taken_over_in_the_step_that_frees_it(driver, sampling, alone):
    driver.rows = [3]
    first = driver.start(prompt_of(50, seed=9), replace(PENALISED, logprobs=2))
    driver.step([(first, 50)])
    driver.finish(first)
    second = driver.start(prompt_of(37), sampling)
    assert second.row == first.row
    result = driver.step([(second, 37)])
    assert result.logprobs == ()
    while len(second.output) < NUM:
        driver.step([(second, 1)])
    assert second.output == alone


def test_page_copies_and_row_updates_move_a_request(driver, sampling, alone):
    """Copy all pages of a running request elsewhere, point its row at the copies, and destroy the originals."""
    req = driver.start(prompt_of(37), sampling)
    while len(req.output) < 5:
        driver.step([(req, len(req.tokens) - req.computed)])
    copies = [driver.pages.pop() for _ in req.pages]
    page_copies = [*zip(req.pages, copies, strict=True)]
    originals, req.pages = req.pages, copies
    update = RowUpdate(req.row, 0, np.array(driver.slots(copies, 0, req.computed), dtype=np.int32).tobytes())
    driver.step([], page_copies=page_copies)
    for pool in (*driver.runner.kv_pool.k, *driver.runner.kv_pool.v):
        pool.view(-1, 4, *pool.shape[1:])[originals] = torch.nan
    driver.step([(req, 1)], row_updates=(update,))
    while len(req.output) < NUM:
        driver.step([(req, 1)])
    assert req.output == alone


def test_an_empty_plan_gives_an_empty_result(driver):
    result = driver.runner.launch(StepPlan(step_id=7, mode=ForwardMode.IDLE)).wait()
    assert (result.step_id, result.next_token_ids, result.errors) == (7, b"", {})


def test_a_chunk_that_ends_nothing_samples_nothing(driver):
    req = driver.start(prompt_of(20))
    result = driver.step([(req, 8)])
    assert result.next_token_ids == b""
    assert result.logprobs == ()


def test_logits_that_are_not_finite_fail_only_their_request(driver):
    healthy = [driver.start(prompt_of(20, seed=n)) for n in range(2)]
    broken = driver.start(prompt_of(20, seed=5), replace(GREEDY, prompt_logprobs=0))
    driver.step([(healthy[0], 20), (broken, 8), (healthy[1], 20)])
    driver.runner.kv_pool.v[0][driver.slots(broken.pages, 3, 4)] = math.nan

    result = driver.step([(broken, 12), (healthy[0], 1), (healthy[1], 1)])

    assert list(result.errors) == [0]
    assert "not finite" in result.errors[0]
    assert 0 not in result.prompt_logprobs
    expected = driver.generate([prompt_of(20, seed=n) for n in range(2)], num=2)
    assert [req.output for req in healthy] == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_chunk_that_is_not_finite_fails_in_its_own_step(driver, value):
    """Not only when the prompt's last chunk samples: its pages are offered to the prefix cache before."""
    healthy = [driver.start(prompt_of(20, seed=n)) for n in range(3)]
    broken = driver.start(prompt_of(20, seed=5))
    driver.step([(healthy[0], 20), (broken, 8), (healthy[1], 8)])
    driver.runner.kv_pool.v[0][driver.slots(broken.pages, 3, 4)] = value

    result = driver.step([(healthy[1], 4), (broken, 4), (healthy[2], 20), (healthy[0], 1)])

    assert list(result.errors) == [1]
    assert "not finite" in result.errors[1]
    assert len(result.next_token_ids) == 2 * 4
    driver.finish(broken)
    assert driver.step([(healthy[1], 8), (healthy[0], 1), (healthy[2], 1)]).errors == {}
    expected = driver.generate([prompt_of(20, seed=n) for n in range(3)], num=3)
    assert [req.output for req in healthy] == [
        tokens[: len(req.output)] for tokens, req in zip(expected, healthy, strict=True)
    ]


class TestLogprobs:
    def test_only_for_those_who_ask_and_as_many_as_they_ask_for(self, driver, unpack):
        params = [GREEDY, replace(GREEDY, logprobs=0), replace(SEEDED, logprobs=7), GREEDY]
        reqs = [driver.start(prompt_of(9, seed=n), one) for n, one in enumerate(params)]
        result = driver.step([(req, 9) for req in reqs])

        assert [packed is not None for packed in result.logprobs] == [False, True, True, False]
        token, top_ids, _ = unpack(result.logprobs[1])
        assert token.shape == (1,)
        assert top_ids.shape == (1, 0)
        token, top_ids, top = unpack(result.logprobs[2])
        assert top_ids.shape == (1, 7)
        assert (np.diff(top[0]) <= 0).all()
        assert np.exp(top).sum() <= 1.0

    def test_are_the_models_own(self, make_tiny_llama, make_driver, unpack):
        """Whatever temperature, filters, penalties and biases do to the choice."""
        tiny = make_tiny_llama()
        driver = make_driver(tiny.spec, tiny.folder)
        odd = replace(PENALISED, temperature=3.0, min_p=0.01, logit_bias={5: 50.0}, logprobs=20)
        req = driver.start(prompt_of(12), odd)
        token, top_ids, top = unpack(driver.step([(req, 12)]).logprobs[0])
        expected = tiny.logprobs(prompt_of(12))[-1]
        assert req.output == [5]
        assert token[0] == pytest.approx(expected[5].item(), abs=1e-4)
        np.testing.assert_allclose(top[0], expected[top_ids[0].tolist()], atol=1e-4)

    def test_of_chosen_tokens(self, make_tiny_llama, make_driver, unpack):
        """Beside requests that have chosen others, or none."""
        tiny = make_tiny_llama()
        driver = make_driver(tiny.spec, tiny.folder)
        prompt = prompt_of(9)
        asked = [(3, 1, 4), (), (2,)]
        params = [replace(GREEDY, logprobs=1, prompt_logprobs=0, logprob_token_ids=each) for each in asked]
        reqs = [driver.start(prompt, each) for each in params]
        result = driver.step([(req, 9) for req in reqs])
        expected = tiny.logprobs(prompt)
        for idx, ids in enumerate(asked):
            for found, rows in (
                (result.logprobs[idx], expected[-1:]),
                (result.prompt_logprobs[idx], expected[:-1]),
            ):
                assert np.frombuffer(found.chosen_ids, dtype=np.int32).tolist() == list(ids)
                chosen = np.frombuffer(found.chosen, dtype=np.float32).reshape(len(rows), len(ids))
                np.testing.assert_allclose(chosen, rows[:, list(ids)], atol=1e-4)

    @pytest.mark.parametrize("start", [0, 7, 32])
    @pytest.mark.parametrize("chunk", [1, 5, 40])
    def test_of_a_prompt_in_chunks(self, make_tiny_llama, make_driver, unpack, chunk, start):
        tiny = make_tiny_llama()
        driver = make_driver(tiny.spec, tiny.folder)
        prompt = prompt_of(33)
        req = driver.start(prompt, replace(GREEDY, prompt_logprobs=3, prompt_logprobs_start=start))
        tokens, tops, ranks = [], [], []
        while not req.output:
            result = driver.step([(req, min(chunk, 33 - req.computed))])
            if 0 in result.prompt_logprobs:
                token, _, top = unpack(result.prompt_logprobs[0])
                tokens += [*token]
                tops += [*top]
                ranks += np.frombuffer(result.prompt_logprobs[0].ranks, dtype=np.int32).tolist()
        assert driver.step([(req, 1)]).prompt_logprobs == {}
        if start == len(prompt) - 1:
            assert not tokens
            return
        expected, targets = tiny.logprobs(prompt)[start:-1], torch.tensor(prompt[start + 1 :])
        own = expected.gather(1, targets[:, None])
        np.testing.assert_allclose(tokens, own[:, 0], atol=1e-4)
        np.testing.assert_allclose(tops, expected.topk(3).values, atol=1e-4)
        assert ranks == ((expected > own).sum(dim=1) + 1).tolist()

    def test_of_a_prompt_do_not_cover_output_computed_again(self, driver, unpack):
        req = driver.start(prompt_of(30), replace(GREEDY, prompt_logprobs=0), prompt_len=20)
        token, _, _ = unpack(driver.step([(req, 30)]).prompt_logprobs[0])
        assert token.shape == (19,)

    def test_of_a_long_prompt_are_computed_in_pieces(self, make_tiny_llama, make_driver, unpack):
        tiny = make_tiny_llama()
        driver = make_driver(tiny.spec, tiny.folder, max_model_len=600)
        prompt = prompt_of(513)
        req = driver.start(prompt, replace(GREEDY, prompt_logprobs=0))
        token, _, _ = unpack(driver.step([(req, 513)]).prompt_logprobs[0])
        np.testing.assert_allclose(token, tiny.logprobs(prompt)[torch.arange(512), prompt[1:]], atol=5e-4)


class TestStops:
    def test_min_new_tokens_masks_every_way_to_end(self, driver):
        """Ends are made likely by a bias, and must not appear before their time."""
        ends = {2: 60.0, 17: 60.0}  # 2 is the model's end-of-sequence token
        sampling = replace(GREEDY, min_new_tokens=6, logit_bias=ends, stop_token_ids=(17,))
        output = driver.generate([prompt_of(10)], sampling, num=8)[0]
        assert not {2, 17} & set(output[:6])
        assert {2, 17} >= set(output[6:])

    def test_min_new_tokens_counts_output_from_before_a_retraction(self, driver):
        sampling = replace(GREEDY, min_new_tokens=6, logit_bias={2: 60.0})
        req = driver.start(prompt_of(14), sampling, prompt_len=10)
        driver.step([(req, 14)])
        driver.step([(req, 1)])
        driver.step([(req, 1)])
        assert 2 not in req.output[4:6]
        assert req.output[6] == 2
