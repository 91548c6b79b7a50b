"""Drafts: whatever is guessed, the tokens are those of decoding one by one; in float32."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.sampling.draft_batch import DraftBatch
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import Driver, Request
from tests.model_runner.drafted_steps import drafted
from tests.model_runner.drafted_steps import step_with_drafts as step
from tests.selection import examples

NUM = 24
KINDS = {
    "greedy": SamplingParams(temperature=0.0, seed=0, max_new_tokens=64),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_new_tokens=64),
    "filtered": SamplingParams(temperature=1.0, top_k=20, min_p=0.01, seed=5, max_new_tokens=64),
    "biased": SamplingParams(
        temperature=0.0, seed=0, max_new_tokens=64, min_new_tokens=9, logit_bias={7: 3.0, 2: 1.0}
    ),
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(96) for _ in range(length)]


@pytest.fixture(params=list(KINDS))
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return KINDS[request.param]


@pytest.fixture
def alone(driver, sampling) -> list[int]:
    """What the request gives without drafts."""
    output: list[int] = driver.generate([prompt_of(37)], sampling, num=NUM + 10)[0]
    return output


def begun(driver: Driver, sampling: SamplingParams, prompt: list[int] | None = None) -> Request:
    """A request with its first token."""
    req = driver.start(prompt_of(37) if prompt is None else prompt, sampling)
    driver.step([(req, len(req.tokens))])
    return req


@pytest.mark.fast_cases(2)
def test_right_drafts_are_all_taken(driver, sampling, alone):
    req = begun(driver, sampling)
    assert step(driver, [(req, alone[1:9])]) == [9]
    assert step(driver, [(req, alone[10:11])]) == [2]
    assert req.output == alone[:12]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_what_follows_a_wrong_draft_is_dropped(driver, sampling, alone, num_right):
    req = begun(driver, sampling)
    wrong = (alone[1 + num_right] + 1) % 96
    drafts = [*alone[1 : 1 + num_right], wrong, *alone[2 + num_right : 6]]
    assert step(driver, [(req, drafts)]) == [num_right + 1]
    while len(req.output) < NUM:  # plain steps and others write over what the wrong draft has left
        step(driver, [(req, alone[len(req.output) :][:2])])
        driver.step([(req, 1)])
    assert req.output == alone[: len(req.output)]


@pytest.mark.fast_cases(1)
def test_random_drafts_among_others(driver, sampling, alone):
    source = random.Random(3)
    others = [begun(driver, each, prompt_of(5 + 9 * n, seed=n)) for n, each in enumerate(KINDS.values())]
    expected = [
        driver.generate([prompt_of(5 + 9 * n, seed=n)], each, num=NUM + 10)[0]
        for n, each in enumerate(KINDS.values())
    ]
    req = begun(driver, sampling)
    reqs, texts = [*others[:2], req, *others[2:]], [*expected[:2], alone, *expected[2:]]
    while min(len(each.output) for each in reqs) < NUM:
        work = []
        for each, text in zip(reqs, texts, strict=True):
            if len(each.output) < NUM:
                ahead = text[len(each.output) :][: source.randrange(6)]
                work.append((each, [t if source.random() < 0.8 else source.randrange(96) for t in ahead]))
        step(driver, work)
    for each, text in zip(reqs, texts, strict=True):
        assert each.output[:NUM] == text[:NUM]


@pytest.mark.fast_cases(2)
def test_the_last_token_stays_on_the_device(driver, sampling, alone):
    """The next step need not be told it: it is the last one that counts, not the last one sampled."""
    req = begun(driver, sampling)
    first = driver.runner.launch(drafted(driver, [(req, [*alone[1:3], (alone[3] + 1) % 96, 5])]))
    req.computed += 3
    req.tokens += [-1, -1, -1]  # there are three, but nobody on the host knows which
    second = driver.runner.launch(driver.plan([(req, 1)]))
    assert np.frombuffer(first.wait().next_token_ids, dtype=np.int32).tolist() == alone[1:4]
    assert np.frombuffer(second.wait().next_token_ids, dtype=np.int32).tolist() == alone[4:5]


@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_a_run_has_the_logprobs_of_single_steps(driver, num_right):
    """Beside a request without any, with a run of another length."""
    kinds = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64, logprobs=2), KINDS["greedy"]
    req, other = begun(driver, kinds[0]), begun(driver, kinds[1], prompt_of(9))
    tokens, expected = list(req.output), []
    single = begun(driver, kinds[0])
    for _ in range(num_right + 1):
        (logprobs,) = driver.step([(single, 1)]).logprobs
        expected.append(logprobs)
    drafts = [*single.output[len(tokens) :][:num_right], *[(single.output[-1] + 1) % 96] * (4 - num_right)]
    result = driver.runner.launch(drafted(driver, [(other, [1]), (req, drafts)])).wait()
    assert result.logprobs[0] is None and result.logprobs[1] is not None
    run = result.logprobs[1]
    assert run.top_k == 2
    for name, dtype in (("token_logprobs", "f4"), ("top_ids", "i4"), ("top_logprobs", "f4")):
        of_single = np.frombuffer(b"".join(getattr(each, name) for each in expected), dtype)
        assert np.frombuffer(getattr(run, name), dtype) == pytest.approx(of_single, abs=1e-5)


def test_logits_that_are_no_numbers_count_where_their_tokens_do(driver):
    req, other = begun(driver, KINDS["greedy"]), begun(driver, KINDS["greedy"], prompt_of(9, seed=1))
    plan = drafted(driver, [(req, [1, 2]), (other, [3])])
    for pool in driver.runner.kv_pool.k:
        pool[driver.slots(req.pages, 5, 6)] = torch.nan
    assert set(driver.runner.launch(plan).wait().errors) == {0}


@settings(max_examples=examples(100))
@given(st.data())
def test_runs_end_at_the_first_wrong_draft(data: st.DataObject):
    num_drafts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    tokens = st.integers(0, 2)
    drafts = [data.draw(st.lists(tokens, min_size=num, max_size=num)) for num in num_drafts]
    sampled = [data.draw(st.lists(tokens, min_size=num + 1, max_size=num + 1)) for num in num_drafts]
    finite = [data.draw(st.lists(st.booleans(), min_size=num + 1, max_size=num + 1)) for num in num_drafts]
    flat_drafts = np.array([token for each in drafts for token in each], dtype=np.int64)
    flat = np.array([token for each in sampled for token in each], dtype=np.int64)
    batch = DraftBatch.of(np.array(num_drafts), flat_drafts, InputBuffers(torch.device("cpu")))

    checked = batch.check(torch.from_numpy(flat))

    runs = []
    for draft, got in zip(drafts, sampled, strict=True):
        num_right = next((n for n, token in enumerate(draft) if got[n] != token), len(draft))
        runs.append(got[: num_right + 1])
    assert checked.num_tokens.tolist() == [len(run) for run in runs]
    assert checked.last_ids.tolist() == [run[-1] for run in runs]
    counts = checked.num_tokens.numpy()
    assert batch.runs(flat.astype(np.int32), counts).tolist() == [token for run in runs for token in run]
    flags = np.array([flag for each in finite for flag in each])
    assert batch.all_true(flags, counts).tolist() == [
        all(each[: len(run)]) for each, run in zip(finite, runs, strict=True)
    ]
