"""Drafts of a layer that predicts further tokens, against plain torch; and what pages hold for it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.drafting import head_programs
from engine.model_runner.drafting.feature_module import FeatureModule
from engine.model_runner.drafting.lag import Run
from engine.model_runner.recording.programs import native_program
from engine.runtime.config.engine_config import ModelConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import GREEDY, Driver, Request, SeeingExecutor, engine_config
from tests.model_runner.drafted_steps import drafted

from .drafters import check_two_ranks, draft, feature_module, recorded_and_not, share
from .mtp_models import FORMS, MTPModel, make_mtp_model

TEXT = [5, 17, 40, 23, 8, 61, 33, 17, 40, 12, 71, 9, 30, 44, 21]


@contextmanager
def seen_logits() -> Iterator[list[torch.Tensor]]:
    """The logits of each draft."""
    seen: list[torch.Tensor] = []
    made = FeatureModule.logits

    def seeing(self: FeatureModule, run: Run, *, first: bool) -> torch.Tensor:
        logits = made(self, run, first=first)
        seen.append(logits.clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureModule, "logits", seeing)
        yield seen


@pytest.fixture
def make(make_tiny_model: Any, make_driver: Any) -> Callable[..., tuple[MTPModel, Driver]]:
    def make_both(form: str = "qwen3.5", **options: Any) -> tuple[MTPModel, Driver]:
        model = make_mtp_model(make_tiny_model, form)
        return model, make_driver(model.spec, model.folder, speculative="mtp", **options)

    return make_both


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_plain_torch(make, form):
    check_logits(*make(form))


def check_logits(model: MTPModel, driver: Driver) -> None:
    """Compare the drafter with plain torch, and the answer with that of the model."""
    req = driver.start(TEXT)
    for chunk in (4, 1, 7, 3):
        driver.step([(req, chunk)])
    for _ in range(3):  # later steps follow accepted and refused drafts
        text = list(req.tokens)
        with seen_logits() as seen:
            draft(driver, [(req, 3)])
        assert len(seen) == 3
        drafts = [int(logits[0].argmax()) for logits in seen]
        for ours, theirs in zip(seen, model.logits(text, drafts[:2]), strict=True):
            torch.testing.assert_close(ours[0], theirs, atol=2e-3, rtol=2e-3)
    assert req.output == model_greedy(model, TEXT, len(req.output))


@pytest.mark.slow
def test_the_longest_unused_program_is_dropped(make_tiny_model, make_driver, monkeypatch):
    monkeypatch.setattr(head_programs, "MAX_PROGRAMS", 2)
    model = make_mtp_model(make_tiny_model, "qwen3.5")
    driver = make_driver(model.spec, model.folder, speculative="mtp", dtype="bfloat16")
    reqs = [driver.start(TEXT[n:]) for n in range(3)]
    driver.step([(req, len(req.tokens)) for req in reqs])
    with recorded_and_not(driver) as programs:
        for counts in ((2, 2, 2), (1, 1, 0), (2, 2, 2), (1, 0, 0), (2, 2, 2), (2, 2, 2), (2, 2, 2)):
            draft(driver, list(zip(reqs, counts, strict=True)))
            assert 0 < len(programs._programs) <= 2
            assert programs.max_tokens == head_programs.MAX_TOKENS
    assert programs.num_replayed >= 1


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_recorded_drafts_have_the_logits_of_others(make_tiny_model, make_driver, form):
    options = {"head_dim": 16} if form == "glm-4.5" else {}
    model = make_mtp_model(make_tiny_model, form, **options)
    driver = make_driver(model.spec, model.folder, speculative="mtp", dtype="bfloat16")
    reqs = [driver.start(TEXT[n:]) for n in range(3)]
    driver.step([(req, len(req.tokens)) for req in reqs])
    with recorded_and_not(driver) as programs:
        for counts in ((2, 3, 1), (0, 0, 0), (2, 0, 2), (1, 1, 1), (3, 2, 4), (2, 2, 2)):
            draft(driver, list(zip(reqs, counts, strict=True)))
    assert programs.num_replayed >= 5


@pytest.mark.slow
def test_numbers_of_tokens_that_cannot_be_recorded_are_computed_call_by_call(make, monkeypatch):
    """Some matmuls have other kernels from a number of tokens on."""
    made, tried = native_program.record, list[int]()

    def small_ones(library: Any, arena: Any, compute: Any) -> Any:
        recorded = made(library, arena, compute)
        (num_tokens,) = inspect.getclosurevars(compute).nonlocals["key"][:1]
        tried.append(num_tokens)
        return recorded if num_tokens < 2 else recorded._replace(program=None, reason_against="too many")

    monkeypatch.setattr(head_programs, "record", small_ones)
    _, driver = make(dtype="bfloat16")
    req = driver.start(TEXT)
    driver.step([(req, len(TEXT))])
    with recorded_and_not(driver) as programs:
        for count in (2, 0, 0, 2, 0, 2):
            draft(driver, [(req, count)])
    assert programs.max_tokens == 1 and programs.num_replayed > 1
    assert [number for number in tried if number > 1] == [3, 2], "each is tried once, and none above"


def model_greedy(model: MTPModel, tokens: Sequence[int], num: int) -> list[int]:
    out = list(tokens)
    with torch.inference_mode():
        for _ in range(num):
            out.append(int(model.model.lm_head(model.features(out)[-1]).argmax()))
    return out[len(tokens) :]


def held(driver: Driver, req: Request, num_pages: int) -> list[torch.Tensor]:
    """Keys and values of the drafter in the first pages, without the first token's; features, positions."""
    share(driver, req)
    pool = driver.runner.kv_pool
    assert pool.page_states is not None and pool.page_ends is not None
    slots = driver.slots(req.pages[:num_pages], 1, 4 * num_pages)
    pages = torch.tensor(req.pages[:num_pages])
    features = feature_module(driver)._head.entered(pool.page_states[pages])
    return [pool.k[-1][slots], pool.v[-1][slots], features, pool.page_ends[pages]]


@pytest.mark.slow
def test_a_prompt_of_one_token_has_no_pair(make):
    model, driver = make("glm-4.5")
    req = driver.start(TEXT[:1])
    driver.step([(req, 1)])
    text = list(req.tokens)
    with seen_logits() as seen:
        draft(driver, [(req, 1)])
    torch.testing.assert_close(seen[0][0], model.logits(text, [])[0], atol=2e-3, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_pages_do_not_depend_on_how_they_were_computed(make, seed):
    """A chat in chunks, decodes and drafts of any number, beside others; and all of its tokens at once."""
    model, driver = make("glm-4.5")
    rng = np.random.default_rng(seed)
    reqs = [driver.start(rng.integers(3, 90, 9 + n).tolist(), GREEDY) for n in range(2)]
    while any(req.computed < len(req.tokens) - 1 for req in reqs):
        lengths = [min(int(rng.integers(1, 6)), len(req.tokens) - req.computed) for req in reqs]
        work = list(zip(reqs, lengths, strict=True))
        driver.step(sorted((w for w in work if w[1]), key=lambda w: w[1] == 1))
    while len(reqs[0].output) < 12:
        draft(driver, [(req, int(rng.integers(0, 4))) for req in reqs])
    for req in reqs:
        again = driver.start(req.tokens[: req.computed], GREEDY)
        driver.step([(again, req.computed)])
        num_pages = req.computed // 4
        for ours, theirs in zip(held(driver, req, num_pages), held(driver, again, num_pages), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
        features = model.features(req.tokens[: req.computed])[3 : 4 * num_pages : 4]
        torch.testing.assert_close(held(driver, req, num_pages)[-2], features, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_a_prefix_loses_nothing(make):
    """The drafts after a cached prefix are those without it."""
    _, driver = make("deepseek-v3", num_host_pages=32)
    first = driver.start(TEXT)
    driver.step([(first, len(TEXT))])
    with seen_logits() as expected:
        draft(driver, [(first, 3)])
    text = first.tokens[: len(TEXT)]
    for prefix_len in (4, 8, 12):
        again = driver.start(text, prefix=(first, prefix_len))
        driver.step([(again, len(text) - prefix_len)])
        with seen_logits() as found:
            draft(driver, [(again, 3)])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_a_swapped_request_goes_on(make):
    _, driver = make("glm-4.5", num_host_pages=32)
    stays, goes = driver.start(TEXT), driver.start(TEXT)
    for req in (stays, goes):
        driver.step([(req, len(TEXT))])
        draft(driver, [(req, 2)])
    old_pages, host = goes.pages, list(range(len(goes.pages)))
    driver.finish(goes, free=False)
    driver.step([], swap_outs=list(zip(old_pages, host, strict=True)))
    driver.pages += old_pages
    back = driver.start(goes.tokens, GREEDY, prompt_len=len(TEXT))
    back.pages = [driver.pages.pop(0) for _ in old_pages]
    back.computed = back.prefix_len = goes.computed
    driver.step([(back, 1)], swap_ins=list(zip(host, back.pages, strict=True)))
    driver.step([(stays, 1)])
    logits = []
    for req in (stays, back):
        with seen_logits() as seen:
            draft(driver, [(req, 3)])
        logits.append(seen)
    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_drafts_are_sampled_with_the_requests_noise(make):
    """With the model's own logits the drafts are its own tokens, though these are sampled at a high temperature."""
    _, driver = make("glm-4.5")
    sampling = SamplingParams(temperature=1.5, top_k=20, seed=7, max_new_tokens=64)
    plain = driver.start(TEXT, sampling)
    executor = SeeingExecutor(driver)
    driver.step([(plain, len(TEXT))])
    while len(plain.output) < 12:
        driver.step([(plain, 1)])
    driver.runner.executor = executor.inner
    known = executor.logits

    def logits(_: FeatureModule, run: Run, *, first: bool) -> torch.Tensor:
        """After the last token only."""
        return known[int(run.positions[-1]) + 1 - len(TEXT)].clone()

    req = driver.start(TEXT, sampling)
    driver.step([(req, len(TEXT))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureModule, "logits", logits)
        assert [draft(driver, [(req, 3)]) for _ in range(2)] == [[4], [4]]
    assert req.output == plain.output[: len(req.output)]


@pytest.mark.slow
def test_requests_of_a_step_have_drafts_of_their_own(make):
    """A step of decodes and prompts with none, some and many drafts gives each the tokens of a life alone."""
    _, driver = make("qwen3-next")
    alone = []
    for n in range(3):
        req = driver.start(TEXT[n:])
        driver.step([(req, len(req.tokens))])
        while len(req.output) < 10:
            driver.step([(req, 1)])
        alone.append(req.output)
    reqs = [driver.start(TEXT[n:]) for n in range(3)]
    driver.step([(req, len(req.tokens)) for req in reqs])
    for counts in ((0, 3, 1), (2, 0, 0), (0, 0, 5), (1, 1, 1), (3, 4, 0)):
        draft(driver, list(zip(reqs, counts, strict=True)))
    for req, expected in zip(reqs, alone, strict=True):
        length = min(len(req.output), len(expected))
        assert req.output[:length] == expected[:length]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_make_the_drafts_of_one(make_tiny_model, form):
    model, capacity = make_mtp_model(make_tiny_model, form), Capacity(256, 128, 4, 8, 96)
    config = dataclasses.replace(
        engine_config(ModelConfig(dtype="float32", device="cpu", num_threads=1, load_format="auto")),
        scheduler=SchedulerConfig(speculative="mtp"),
    )
    check_two_ranks(config, model.folder, model.spec, capacity)


def test_a_copy_of_a_page_keeps_the_pair_that_came_with_it(make):
    """A sample starts before the last token of the prompt, in a copy of the page of another one that has gone on."""
    _, driver = make("glm-4.5")
    text = TEXT[:7]
    first = driver.start(text)
    for count in (7, 1, 1):
        driver.step([(first, count)])
    sample = driver.start(text)
    sample.pages = [first.pages[0], driver.pages.pop()]
    sample.computed = sample.prefix_len = 6
    driver.step([(sample, 1)], page_copies=[(first.pages[1], sample.pages[1])])
    driver.step([(sample, 1)])
    for ours, theirs in zip(held(driver, sample, 2), held(driver, first, 2), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_page_keeps_the_feature_of_its_end_when_decodes_cross_it(make):
    """One step of drafts begins before the end of a page and ends after it."""
    model, driver = make("glm-4.5")
    req = driver.start(TEXT[:6])
    driver.step([(req, 6)])
    answer = model_greedy(model, TEXT[:6], 4)
    plan = drafted(driver, [(req, answer[1:4])])
    driver.runner.launch(plan).wait()
    torch.testing.assert_close(
        held(driver, req, 2)[-2][1], model.features(TEXT[:6] + answer)[7], atol=1e-3, rtol=1e-3
    )
    assert held(driver, req, 2)[-1].flatten().tolist() == [3, 7]
